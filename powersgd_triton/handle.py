"""The methods that the state of every adapter and ``Compressor`` share. They forward to an engine."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from powersgd_triton.checkpoint import StateDict, opened
from powersgd_triton.checkpoint import save as save_file
from powersgd_triton.comm.agreement import Facts, together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.exchange import exchanges
from powersgd_triton.config import PowerSGDConfig, whole_number
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.loading import adopt, compared, errors, forget, save
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.core.telemetry import Callback, Telemetry
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import Size, sizes
from powersgd_triton.ops.step import LossScale, LossScaleSource
from powersgd_triton.planning.tuning import Tuning
from powersgd_triton.ranks.report import RankReport

FILE = "powersgd.pt"
"""The file that ``save`` writes into a checkpoint's folder."""

FOUND = "finds a saved PowerSGD state"
"""In this, workers must not differ when they load."""

T = TypeVar("T")
Folder = str | os.PathLike[str]


class Handle:
    """Access to the compression of one model.

    Attributes:
        saved_with_model: Whether the framework's own checkpoints contain the state, as DeepSpeed's do.
        replaces_reduce_scatter: Whether gradients would be reduce-scattered without compression, not all-reduced.
        no_loss_scale: Why errors cannot follow a loss scale. Empty if they can.
        left_out: Names of parameters that the framework averages itself, without compression.
    """

    saved_with_model = False
    replaces_reduce_scatter = False
    no_loss_scale = ""
    left_out: tuple[str, ...] = ()
    _managed: Any = None

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step, self._residuals = engine, engine.step, engine.residuals
        if engine.plan.measures:
            engine.listeners.append(Tuning(engine))

    @property
    def _communicator(self) -> Communicator:
        return self._engine.communicator

    @property
    def config(self) -> PowerSGDConfig:
        """Configuration of the compression."""
        return self._engine.config

    @property
    def iteration(self) -> int:
        """Number of finished steps. Each average of the same gradients is one step."""
        # If an adapter does not know which bucket is the last one, the step stays open until the next step begins.
        return self._step.iteration + (bool(self._step.keys) and self._step.last is None)

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before, elements after) over the steps so far. The rate is 0 before the first.

        The first ``start_iter`` steps, which average exactly, count in ``Compressor`` only.
        """
        before, after = self._engine.numel
        return (before / after if after else 0.0, before, after)

    def report(self) -> RankReport:
        """Return which tensors are compressed, at which rank, and the bytes of a step. ``print`` shows a table.

        If shards of parameters are compressed, the report describes this worker's shard. With DDP and without
        ``module=``, it has the parameters whose gradients have come so far.
        """
        plan, config, communicator = self._engine.plan, self.config, self._communicator
        buckets = self._engine.buckets.in_use()
        kinds, zeroed = exchanges(buckets, config, communicator), sum(int(n.sum()) for b in buckets for n in b.zeroed)
        further = {"exchanges": kinds, "node_workers": communicator.share[1], "zeroed": zeroed}
        return RankReport.of(self._layout(), config, plan.spectra, left_out=self.left_out, **further)

    def _layout(self, given: Layout | None = None) -> Layout:
        """Return a layout, or that of all tensors that are known so far, with the ranks in force."""
        return self._engine.plan.ranked(given or Layout.build(self._engine.tensors(), self.config))

    def attach(self, scaler: LossScaleSource) -> None:
        """Make the error follow the loss scale of a ``torch.amp.GradScaler``, or a scale that a function returns.

        Call it once, before training. It does not synchronize with the device.

        Raises:
            TypeError: ``scaler`` is neither a scaler nor a function, or there is nothing to scale, as in local steps.
        """
        if self.no_loss_scale:
            raise TypeError(f"{self.no_loss_scale}; got {scaler!r}")
        self._step.loss_scale = LossScale(scaler)

    def telemetry(self, callback: Callback | None = None, *, writer: Any = None, every: int = 50) -> None:
        """Report each ``every``-th step: the energy that it captures, errors, bytes and times. Off by default.

        A record also goes to the logger ``powersgd_triton`` at level INFO. The numbers are this worker's own. On the
        CPU a record comes at the end of its step, and on CUDA at the end of a later one, since nothing waits for the
        device. Checkpoints, copies and pickles do not contain the setting. See docs/telemetry.md.

        Args:
            callback: Called with each record, until it raises an exception. It must not call collectives.
            writer: A ``torch.utils.tensorboard.SummaryWriter``, or another object with its ``add_scalar``.
            every: Steps from one measured step to the next. 0 switches telemetry off.

        Raises:
            TypeError, ValueError: An argument has the wrong type or is out of range. Nothing was changed.
        """
        every = whole_number("every", every)
        new = [Telemetry(self._engine, callback, writer, every)] if every else []
        kept = [listener for listener in self._engine.listeners if not isinstance(listener, Telemetry)]
        if not every:
            self._engine.schedule.mark = lambda _: None
        # Last, since a user's function may raise an exception.
        self._engine.listeners[:] = [*kept, *new]

    def error(self) -> dict[str, Tensor]:
        """Return copies {name: E [n, m]} of this worker's errors, without the loss scale.

        Of a batch of matrices, E is [batch · n, m].

        E is what this worker has not sent yet. If sums take two levels, E is what the node has not sent yet in this
        worker's rows, and zero in the others. The result is empty without error feedback. Collective if the parameters
        are sharded.
        """
        return errors(self._engine)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the mean error over workers, the bases and the step, as plain tensors and numbers. Collective.

        Any worker's result can be loaded on all workers at any world size, since only the mean error matters. The last
        step counts as applied if that is not known yet: before ``decompress`` with a loss scale, or a manager's vote.
        """
        return save(self._engine)

    def load_state_dict(self, state_dict: StateDict) -> LoadReport:
        """Continue from a saved state, as ``Compressor.load_state_dict`` without its options. Collective."""
        return self._loading(state_dict)()

    def _loading(self, state_dict: StateDict, **options: Any) -> Callable[[], LoadReport]:
        """Check a saved state, and return a function that continues from it. Collective; the function is not."""

        def read() -> tuple[Any, Mapping[str, Size]]:
            return opened(state_dict), sizes(self._engine.tensors(), self.config)

        return functools.partial(adopt, self._engine, *compared(self._engine, read, **options))

    def save(self, folder: Folder) -> None:
        """Write the state into a checkpoint's folder, which all workers can read. Collective.

        Each state needs a folder of its own, also that of another group of workers which has a part of the same model.
        An interrupted call leaves what an earlier call has written. If the folder cannot be written, that is an OSError
        on the worker that writes, and a ``DisagreementError`` on the others.
        """
        path = self._together("save", lambda: Path(folder))
        saved = self.state_dict()
        self._together("save", lambda: self._write(saved, path))

    def load(self, folder: Folder, *, missing_ok: bool = False) -> LoadReport | None:
        """Continue from what ``save`` wrote. Collective.

        With ``missing_ok`` the folder may have been written without compression. Errors then start at zero.

        Returns:
            What was used of the state, and what was not. None if the folder has no state.

        Raises:
            FileNotFoundError: The folder has no state. Nothing was changed.
            ValueError: A worker's state belongs to another model or wrapper, or has another format. Nothing was
                changed.
            DisagreementError: Workers load different states, or only some of them find one. Nothing was changed.
        """
        go_on = self._reading(lambda: Path(folder))
        if go_on is None:
            self._begin_without(folder, missing_ok)
            return None
        return go_on()

    def forget(self) -> None:
        """Set all errors to zero, because the weights were replaced."""
        forget(self._engine)

    def _reading(self, find: Callable[[], Path]) -> Callable[[], LoadReport] | None:
        """Return a function that continues from the state in the folder that ``find`` returns. None if it has none.

        Collective.
        """
        found = self._together("load", lambda: self._find(find() / self._file()), FOUND)
        return None if found is None else functools.partial(self.load_state_dict, self._read(found))

    def _file(self) -> str:
        return FILE

    def _find(self, path: Path) -> Path | None:
        """Return where there is a saved state."""
        return path if path.exists() else None

    def _write(self, state: Mapping[str, Any], folder: Path) -> None:
        if self._communicator.index == 0:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(state, folder / self._file())

    def _read(self, path: Path) -> StateDict:
        """Return what ``load_state_dict`` takes. Possibly collective."""
        return path

    def _begin_without(self, folder: Folder, missing_ok: bool) -> None:
        """Forget all errors, because a folder has no state. Collective. Raise an error if it must have one."""

        def check() -> None:
            path = Path(folder) / self._file()
            # Else the errors of such a state would be lost without a word. What ends in .new was never complete.
            found = sorted(other.name for other in path.parent.glob("powersgd*") if other.suffix != ".new")
            if found:
                raise ValueError(
                    f"{path.parent} has {', '.join(found)} and not {path.name}: the state of another wrapper, or of "
                    "several models. Continue with what saved it, or remove it to start with errors of zero"
                )
            if not missing_ok:
                raise FileNotFoundError(f"there is no saved PowerSGD state {path}")

        self._together("load", check)
        # It counts, also if the adapter does not know yet that it has ended.
        self._engine.finish()
        self.forget()

    def _examined(self, examine: Callable[[], T]) -> T:
        """Return what a step finds in its arguments. In the first step, all workers hear of an error."""
        # In later steps, they have begun a sum, which would meet this worker's next one if they left it.
        return self._together("a step", examine) if self._engine.buckets.compared is None else examine()

    def _together(self, call: str, act: Callable[[], T], fact: str | None = None) -> T:
        """Run code that may fail on one worker only. ``fact`` says what a result means that is true on all or none."""

        def acted() -> tuple[T, Facts, Facts]:
            result = act()
            return result, {} if fact is None else {fact: bool(result)}, {}

        return together(call, acted, self._everyone(), self._engine.buckets.device)

    def _everyone(self) -> Communicator:
        """Return the collectives of the workers that save and load together."""
        return self._communicator
