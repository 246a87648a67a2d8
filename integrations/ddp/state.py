"""The state of DDP's hooks, with the name and arguments of torch's class."""

import logging
from collections.abc import Mapping
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import powersgd_triton.integrations.ddp.arguments as arguments
from powersgd_triton.checkpoint import StateDict, opened
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import AUTO, NodeGroup
from powersgd_triton.config import PowerSGDConfig, whole_number
from powersgd_triton.core.loading import load, own_state, restore, save
from powersgd_triton.core.saved_state import LoadReport, check_version
from powersgd_triton.handle import Handle
from powersgd_triton.integrations.common import plain_name, uncompiled
from powersgd_triton.integrations.ddp.parameters import ParameterNames, Record, UnusedParameters
from powersgd_triton.integrations.ddp.views import Place
from powersgd_triton.layout.matrices import Size, sizes
from powersgd_triton.schemes import new_engine

logger = logging.getLogger("powersgd_triton.integrations.ddp")


class PowerSGDState(Handle):
    """Hyperparameters and memory of one model's compression, with the arguments of torch's class of this name.

    A ``PowerSGDConfig`` can be given in place of all hyperparameters, as ``PowerSGDState(config, module=model)`` or
    after the process group. It keeps its own defaults, so it compresses from the first step.

    docs/guides/ddp.md lists the differences from torch's. Hyperparameters cannot be assigned after construction.

    Args:
        process_group: Group to average over. None uses the default group. Can be set between steps.
        matrix_approximation_rank: Number of columns of the factors, or a function (name, shape) → rank. Omit it if
            ``compression=``, ``bytes_per_step=`` or ``quantize=`` is among the options.
        start_powerSGD_iter: Number of first steps with exact averaging. May be 0 or 1.
        min_compression_rate, use_error_feedback, warm_start, orthogonalization_epsilon: See ``PowerSGDConfig``.
        random_seed: Seed of the first Q and of replacement directions.
        compression_stats_logging_frequency: Number of steps between two log messages with statistics.
        batch_tensors_with_same_shape: Without effect. Tensors of the same shape are always batched, without copies.
        module: The model, whose parameter names key the state. Give the DistributedDataParallel model itself if it has
            ``find_unused_parameters=True`` or ``static_graph=True``, so that the error keeps what DDP discards of
            parameters that no worker used: that of the first wrapper, so make a new state for a new one. Without
            ``module=``, parameters are numbered in the order of the first backward pass that the hook sees, and a
            checkpoint fits only the same bucket boundaries.
        node_group: See ``Compressor``.
        options: Further fields of ``PowerSGDConfig``, if no configuration is given.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    __signature__ = arguments.SIGNATURE
    _unused: UnusedParameters | None = None

    matrix_approximation_rank = arguments.setting("matrix_approximation_rank")
    start_powerSGD_iter = arguments.setting("start_powerSGD_iter")
    min_compression_rate = arguments.setting("min_compression_rate")
    use_error_feedback = arguments.setting("use_error_feedback")
    warm_start = arguments.setting("warm_start")
    orthogonalization_epsilon = arguments.setting("orthogonalization_epsilon")
    batch_tensors_with_same_shape = arguments.setting("batch_tensors_with_same_shape")

    error_dict = p_memory_dict = q_memory_dict = rng = property(arguments.of_torchs_hook)

    @overload
    def __init__(
        self,
        config: PowerSGDConfig,
        *,
        process_group: dist.ProcessGroup | None = None,
        compression_stats_logging_frequency: int = 10_000,
        module: nn.Module | None = None,
        node_group: NodeGroup = None,
    ) -> None: ...

    @overload
    def __init__(self, process_group: dist.ProcessGroup | None, *hyperparameters: Any, **named: Any) -> None: ...

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        config, given = arguments.parsed(positional, keywords)
        arguments.log(config, given)
        self.compression_stats_logging_frequency = max(1, given["compression_stats_logging_frequency"])
        self.next_stats_report = 0
        # A compiled DDP model is one.
        module = uncompiled(given["module"])
        if config.planned and module is None:
            raise ValueError("a budget needs all parameters: give PowerSGDState the model as module=")
        self._set_up(config, module, given["process_group"], given["node_group"])
        if isinstance(module, DistributedDataParallel) and (module.find_unused_parameters or module.static_graph):
            self._unused = UnusedParameters(self._residuals, self._step, module, self._names.names)

    def _set_up(
        self, config: PowerSGDConfig, module: nn.Module | None, group: dist.ProcessGroup | None, node_group: NodeGroup
    ) -> None:
        names = self._names = ParameterNames(module)
        # Without ``module=`` the model is not known before its gradients come.
        device = next((parameter.device for parameter in names.names), None)
        communicator = Communicator(group, node_group=node_group)
        super().__init__(new_engine(config, communicator, names.shapes, device))
        # What another process group can use: groups that a user gave were made for this one.
        self._automatic_nodes = AUTO if node_group == AUTO else None
        # The backward pass of the newest step, by autograd's number.
        self._pass = -1
        # How each gradient lies in its bucket.
        self._places: dict[Tensor, Place] = {}
        # {index: parameters} of the buckets of ``batched_powerSGD_hook``: of the newest ones, and of those with errors.
        self._whole: dict[int, list[Tensor]] = {}
        self._compressed: dict[int, list[Tensor]] = {}
        # Indices of the buckets whose memory was logged.
        self._logged: set[int] = set()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Group to average over. None means the default group. Can be set between steps."""
        return self._communicator.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        if group is not self.process_group:
            if self._communicator.node_group != self._automatic_nodes:
                logger.warning("the groups given as node_group belong to another process group; sums take one level")
            self._engine.connect(Communicator(group, node_group=self._automatic_nodes))

    @property
    def iter(self) -> int:
        """Number of finished steps."""
        return self._step.iteration

    @iter.setter
    def iter(self, value: int) -> None:
        self._step.iteration = whole_number("iter", value)

    @property
    def total_numel_before_compression(self) -> int:
        """Number of elements of all gradients in compressed steps so far."""
        return self.compression_stats()[1]

    @property
    def total_numel_after_compression(self) -> int:
        """Number of elements sent for these gradients."""
        return self.compression_stats()[2]

    def _check_owner(self) -> None:
        """Drop a pickle's error unless this is the worker that pickled it. Call it before the error is used."""
        owner = self._residuals.claim(self._communicator)
        if owner is not None:
            logger.warning(
                "This PowerSGDState was pickled by worker %s of %s and is used by worker %s of %s, so that "
                "its error is dropped. It is that of one worker: save state_dict() instead, with the mean error.",
                *(*owner, *self._communicator.place),
            )

    def state_dict(self) -> dict[str, Any]:
        """See ``Handle.state_dict``. Statistics are not included."""
        self._check_owner()
        return {**save(self._engine), "buckets": self._names.record()}

    def load_state_dict(
        self, state_dict: StateDict, *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> LoadReport:
        """Continue from a saved state of any world size, bucket size and rank. Collective: call it on all workers.

        See ``Compressor.load_state_dict``. Without ``module=``, parameters are compared in the first step.
        """
        expected: Record = []
        names: dict[str, str] = {}

        def read() -> tuple[Any, Mapping[str, Size] | None]:
            names.update((plain_name(old), plain_name(new)) for old, new in (rename or {}).items())
            saved = opened(state_dict)
            if not isinstance(saved, Mapping) or "buckets" not in saved:
                raise ValueError("expected the result of state_dict() of a PowerSGDState; the key 'buckets' is missing")
            check_version(saved.get("format_version"))
            expected[:] = self._names.check(saved["buckets"], strict=strict, rename=names)
            # Parameters that were frozen are not in it, but may be among those that are renamed.
            known, given = self._names.shapes(frozen=True), saved.get("tensors") or ()
            for old in [old for old, new in names.items() if old not in given and new in known]:
                del names[old]
            # A state with matrices but without a record is of batched_powerSGD_hook, which does not know parameters.
            named = self._names.module is not None and (expected or saved.get("matrices") == {})
            # Those that are frozen now may have an error of the time before.
            held = {names.get(name, name) for name in saved.get("matrices") or ()}
            frozen = {name: shape for name, shape in known.items() if name in held}
            return saved, sizes(frozen | self._names.shapes(), self.config) if named else None

        report = load(self._engine, read, strict=strict, rename=names)
        self._names.expect(expected)
        return report

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the process group, with this worker's own error. Prefer ``state_dict``."""
        if self.config.planned and not self._names.record():
            raise ValueError("a PowerSGDState with a budget can be pickled after its first step, when it has buckets")
        arguments.torchs_logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return self._content()

    def __setstate__(self, saved: dict[str, Any]) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        self._set_up(saved["config"], None, group, saved.get("node_group"))
        # With torch's spaces, so that a filter for torch's message finds this one.
        arguments.torchs_logger.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size).                "
            "If a different group is desired, please set `self.process_group` after PowerSGD state is loaded."
        )
        self._restore(saved)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PowerSGDState":
        """Return a copy with its own errors, bases and plan, and the same process group, module and loss scale."""
        copied: PowerSGDState = type(self).__new__(type(self))
        memo[id(self)] = copied
        content = self._content()
        copied._set_up(content["config"], self._names.module, self.process_group, self._communicator.node_group)
        copied._restore(content)
        if self._step.loss_scale is not None:
            copied.attach(self._step.loss_scale.source)
        return copied

    def _content(self) -> dict[str, Any]:
        return {
            **own_state(self._engine),
            "buckets": self._names.record(),
            "node_group": self._automatic_nodes,
            "compression_stats_logging_frequency": self.compression_stats_logging_frequency,
            "next_stats_report": self.next_stats_report,
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        self._names.expect(saved["buckets"])
        # With a module, the names are those of the model.
        restore(self._engine, saved, strict=self._names.module is None)
        self.compression_stats_logging_frequency = saved["compression_stats_logging_frequency"]
        self.next_stats_report = saved["next_stats_report"]


# Pickles contain the module's name. Use the public one.
PowerSGDState.__module__ = "powersgd_triton.integrations.ddp"
