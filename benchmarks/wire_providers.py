"""Narrow factors on the wire between workers of which one exists: each stage by itself, by kernels or reference."""

import torch

from benchmarks.cases import WIRE_PHASES
from benchmarks.shapes import count_parameters
from benchmarks.timing import Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.kernels.configurations import Launch, architecture, select_configuration
from powersgd_triton.kernels.wire import TritonWire
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.wire_format import FORMATS, WirePlan
from powersgd_triton.ops.wire import TorchWire, Wire
from powersgd_triton.planning.models import Shapes

WORKERS = 4
ITEMSIZE = 4


class PreparedWire:
    """The message of Q of all gradients with the bypass tensors behind it, and all bytes that a stage reads.

    Args:
        shapes: the gradients'.
        rank: the approximation's.
        width: of the factors, a name in ``FORMATS``.
        kernels: whether Triton's kernels do the work, or else the reference.
        device: where.
        launch: the kernels' launches; None for those of the device's architecture.
    """

    def __init__(
        self, shapes: Shapes, rank: int, width: str, kernels: bool, device: torch.device, launch: Launch | None = None
    ) -> None:
        layout = Layout.build({str(i): shape for i, shape in enumerate(shapes)}, PowerSGDConfig(rank=rank))
        factors = layout.factor_shapes(left=False)
        self._plan = WirePlan.build(FORMATS[width], factors, layout.bypass_numel, ITEMSIZE, WORKERS)
        self.gradient_bytes = ITEMSIZE * count_parameters(shapes)
        launch = launch or select_configuration(architecture(device), rank).wire
        self._wire: Wire = (
            TritonWire(self._plan, launch, rank, device) if kernels else TorchWire(self._plan, torch.float32, device)
        )
        generator = torch.Generator(device).manual_seed(0)
        self._message = torch.randn(layout.q_numel + layout.bypass_numel, generator=generator, device=device)
        self._own = torch.empty(layout.q_numel, device=device)
        self._sent, self._sums = torch.zeros(2, WORKERS, self._plan.size, dtype=torch.uint8, device=device)
        self.decoded = torch.empty_like(self._message)
        for phase in WIRE_PHASES:
            self.work(phase)()

    def work(self, phase: str) -> Work:
        """One stage, as often as one likes: of own, which each sum changes, less and less is left, but it is finite."""
        if phase == "encode":
            return lambda: self._wire.encode(self._message, self._own, out=self._sent)
        if phase == "reduce":
            # As if all workers had sent the same.
            received = self._sent[:1].expand(WORKERS, -1).contiguous()
            return lambda: self._wire.reduce(received, self._own, 0, out=self._sums[0])
        return lambda: self._wire.decode(self._sent, out=self.decoded)

    def bytes_of(self, phase: str) -> int:
        """The fewest bytes a stage moves: each input read once, each output written once."""
        message, own, content = self._message.nbytes, self._own.nbytes, WORKERS * self._plan.size
        mine = ITEMSIZE * sum(piece.numel for piece in self._plan.chunks[0].pieces)
        return {
            "encode": message + own + content,
            "reduce": content + self._plan.size + 2 * mine,
            "decode": content + message,
        }[phase]
