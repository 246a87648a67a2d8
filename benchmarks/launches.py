"""The kernels' launches of one step, recorded while it runs, so that each can be run again and timed by itself."""

import contextlib
import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor

import powersgd_triton.kernels
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.schemes import new_engine

PHASES = (
    *["compensate_project", "pack P", "orthogonalize P", "backproject", "pack Q", "orthogonalize Q", "explore"],
    "commit",
    "reconstruct",
)
ORTHOGONALIZE = ("gram", "inner_products", "orthogonalize")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel: what to call with what, again and again."""

    name: str
    kernel: Any
    grid: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.named)

    def parameters(self) -> dict[str, Any]:
        """{name: value} of the kernel's parameters."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False)) | {
            name: value for name, value in self.named.items() if name in self.kernel.arg_names
        }

    def options(self) -> dict[str, Any]:
        """Triton's own keywords."""
        return {name: value for name, value in self.named.items() if name not in self.kernel.arg_names}


class Problem:
    """A bucket's compression as the hook does it, with its parts in reach.

    Args:
        gradients: {name: contiguous tensor}.
        rank: the approximation's.
        backend: "triton" or "torch".
        options: further fields of ``PowerSGDConfig``.
    """

    def __init__(self, gradients: Mapping[str, Tensor], rank: int, backend: str, **options: Any) -> None:
        config = PowerSGDConfig(rank=rank, backend=backend, **options)
        self.gradients = dict(gradients)
        shapes = {name: tuple(tensor.shape) for name, tensor in gradients.items()}
        self.layout = Layout.build(shapes, config)
        self.engine = new_engine(config, Communicator(), lambda: shapes)

    def step(self, out: Mapping[str, Tensor]) -> Backend:
        """One step; ``out`` gets the averages, and may be the gradients."""
        found: list[Backend] = []

        def write(backend: Any) -> None:
            backend.reconstruct(out, None)
            found.append(backend)

        device = next(iter(self.gradients.values())).device
        layout = self.engine.begin("all", lambda: self.layout.shapes, device, last=True)
        self.engine.average(layout, self.gradients, write=write)
        return found[0]


def record_step(
    problem: Problem, out: Mapping[str, Tensor], *, run: bool = True
) -> tuple[Bucket, dict[str, list[Launch]]]:
    """Run one step; give the bucket's memory and the launches of each of the step's ``PHASES``."""
    with recording(run=run) as launches:
        bucket = problem.step(out).bucket
    phases: dict[str, list[Launch]] = {}
    previous, side = "", "P"
    for launch in launches:
        kind = "orthogonalize" if launch.name in ORTHOGONALIZE else launch.name
        if previous == "backproject":
            side = "Q"
        phase = f"{kind} {side}" if kind in ("pack", "orthogonalize") else kind
        phases.setdefault(phase, []).append(launch)
        previous = launch.name
    return bucket, phases


@contextlib.contextmanager
def recording(*, run: bool = True) -> Iterator[list[Launch]]:
    """Note the launches of the package's kernels, which run as ever, or not at all."""
    noted: list[Launch] = []

    class Recorder:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **named: Any) -> None:
                noted.append(Launch(self.name, self.kernel, grid, arguments, named))
                if run:
                    noted[-1]()

            return launch

    package = powersgd_triton.kernels
    with contextlib.ExitStack() as stack:
        # Else launches of earlier steps are repeated past the recorders.
        stack.enter_context(mock.patch("powersgd_triton.kernels.launcher.KNOWN", False))
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for attribute in [name for name in vars(module) if name.startswith("_") and name.endswith("_kernel")]:
                kernel = getattr(module, attribute)
                if hasattr(kernel, "__getitem__"):
                    name = attribute.strip("_").removesuffix("_kernel")
                    stack.enter_context(mock.patch.object(module, attribute, Recorder(name, kernel)))
        yield noted


def bytes_of(phase: str, layout: Layout, itemsize: int) -> int:
    """The fewest bytes a phase moves: each input read once, each output written once; gradients of ``itemsize``."""
    matrices = sum(segment.numel for segment in layout.compressed)
    p, q, bypass = layout.p_numel, layout.q_numel, layout.bypass_numel
    return {
        "compensate_project": matrices * (itemsize + 8) + 4 * (2 * p + 2 * q),
        "pack P": 8 * p + (itemsize + 4) * bypass,
        "orthogonalize P": 8 * p,
        "backproject": 4 * matrices + 4 * (p + q),
        "pack Q": 12 * q + 8 * bypass,
        "orthogonalize Q": 8 * q,
        # Nothing where it is no matrix's turn. Which ones explore depends on the step.
        "explore": 0,
        "commit": 16 * q,
        "reconstruct": matrices * itemsize + 4 * (p + q) + bypass * (itemsize + 4),
    }[phase]


def bytes_of_step(layout: Layout, itemsize: int) -> int:
    """The fewest bytes of a whole step with fp32 error buffers, without factors: G and E read and E written, E read,
    Ĝ written; bypass tensors read and written."""
    matrices = sum(segment.numel for segment in layout.compressed)
    return matrices * (2 * itemsize + 12) + 2 * itemsize * layout.bypass_numel
