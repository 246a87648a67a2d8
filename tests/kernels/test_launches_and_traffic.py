"""Launches of a step are as many for many matrices, move little, stay in their memory, and run in any order."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core.scheme import FlatAverage
from powersgd_triton.kernels import explore, gram, table
from powersgd_triton.layout.layout import Layout
from powersgd_triton.planning.trial import StandIn
from powersgd_triton.schemes import new_engine
from powersgd_triton.schemes.quantized_mean import Exchange, summed
from tests.support.checks import everything, gradients, step
from tests.support.device import INTERPRETED
from tests.support.interpreter import CHECKED, random_order, watched
from tests.support.thinned import slow, thinned

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="counts in the interpreter")

MOST_LAUNCHES = 13
MORE_UNITS = 0.4
LEAST_UNITS = {"standard": 5, "alternating": 4}

# Three launches a message, two between two workers, and a tenth of what the rest of a step moves.
WIRE_LAUNCHES = ["_encode_kernel", "_reduce_kernel", "_decode_kernel"]
LAUNCHES_OF_TWO = ["_encode_kernel", "_decode_kernel"]
MOST_OF_A_STEP = 0.1
WORKERS = 4


class Among(StandIn):
    """One of some workers that all send the same; it copies past torch, so that nothing is counted."""

    def __init__(self, workers: int = WORKERS) -> None:
        super().__init__(workers, index=1)

    def all_reduce(self, tensor: Tensor) -> None:
        np.multiply(tensor.numpy(), self.world_size, out=tensor.numpy())

    def all_to_all(self, received: Tensor, sent: Tensor, _sizes: Sequence[int] | None = None) -> None:
        received.numpy()[:] = sent.numpy()[self.index]

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        """Of the others' sums nothing is known here: zeros."""
        gathered.numpy()[:] = 0
        gathered.numpy()[self.index] = tensor.numpy()


def steps(
    shapes: Sequence[tuple[int, ...]],
    rank: int,
    *,
    number: int = 2,
    run_kernels: bool = True,
    communicator: Communicator | None = None,
    cut: Callable[[str, Tensor], tuple[int, Tensor]] | None = None,
    **fields: Any,
):
    """Run so many steps in one bucket; what each of them did. On one worker, if there is no ``communicator``.

    The averages are written to the gradients, or to the parts that ``cut(name, gradient)`` returns.
    """
    named = {str(index): shape for index, shape in enumerate(shapes)}
    config = everything(rank, backend="triton", **fields)
    engine = new_engine(config, communicator or Communicator(), lambda: named)
    activities = []
    for seed in range(number):
        now, layout = gradients(seed, named), engine.begin("all", lambda: named, torch.device("cpu"), last=True)
        ranges = None if cut is None else {name: cut(name, gradient) for name, gradient in now.items()}
        with watched(run_kernels=run_kernels) as activity:
            engine.average(layout, now, ranges=ranges)
        activities.append(activity)
    return activities


def rows(_: str, gradient: Tensor) -> tuple[int, Tensor]:
    """Of FSDP2: a quarter of the rows."""
    first, width = len(gradient) // 4, gradient[0].numel()
    return first * width, torch.empty(first * width)


def elements(_: str, gradient: Tensor) -> tuple[int, Tensor]:
    """Of FSDP1 and of DeepSpeed's ZeRO: what lies in a flat partition, which is cut anywhere."""
    return 2, torch.empty(gradient.numel() - 3)


FIELDS: list[dict[str, Any]] = [{}, {"error_feedback": False}, {"algorithm": "alternating"}]


@thinned("fields, rank, cut", FIELDS, (1, 4, 16, 32), (None, rows, elements))
def test_launches_do_not_depend_on_the_number_of_matrices(fields: dict[str, Any], rank: int, cut: Any):
    """DDP's hook and plain loops write over the gradients, the adapters of sharded models to their shards."""
    one, many = (
        steps(
            [(40 + i % 3, 36 - i % 2) for i in range(n)] + [(7,)] * n, rank, communicator=Among(), cut=cut,
            run_kernels=False, **fields,
        )[-1]
        for n in (1, 60)
    )  # fmt: skip
    assert one.launches == many.launches
    assert cut is not None or one.operations == []
    assert 0 < len(one.launches) <= MOST_LAUNCHES


@pytest.mark.parametrize("quantize", ["int8", "ternary"])
def test_quantized_averages_launch_as_much_for_many_matrices_and_workers(quantize: str):
    """The last worker's part is short."""

    def averaged(M: Tensor, exchange: Exchange) -> Iterator[object]:
        messages = yield from summed(M, exchange)
        messages.write(torch.empty(len(M)))

    config, launches = PowerSGDConfig(quantize=quantize, backend="triton"), []
    for count, workers in ((1, 4), (7, 16)):
        layout = Layout.build({str(i): (300, 41) for i in range(count)}, config)
        M, out = torch.randn(layout.numel), {name: torch.empty(300, 41) for name in layout.shapes}
        with watched(run_kernels=False) as activity:
            for _ in averaged(M, Exchange(config, Among(workers))):
                pass
            FlatAverage(layout, M).reconstruct(out, torch.ones(()))
        launches.append(activity.launches)
    assert launches[0] == launches[1]
    assert len(activity.kernels) == 6


@pytest.mark.parametrize("algorithm", ["standard", "alternating"])
@pytest.mark.parametrize("sizes", [(128, 128, 1), *slow([(512, 512, 4), (512, 768, 4), (1024, 512, 4)])], ids=str)
def test_a_step_moves_little_more_than_the_gradients_must(sizes: tuple[int, int, int], algorithm: str):
    """Read G, read and write M, write Ĝ, in the standard algorithm read M again; and the factors."""
    n, m, rank = sizes
    # The first step has no error yet. The alternating algorithm multiplies from the right, then from the left.
    for activity in steps([(n, m)], rank, number=2 + (algorithm == "alternating"), algorithm=algorithm)[1:]:
        assert activity.operations == []
        units = activity.moved / (4 * n * m)
        assert 0 <= units - LEAST_UNITS[algorithm] <= MORE_UNITS


@thinned(
    "workers, algorithm, wire_dtype",
    (WORKERS, 2), ("standard", "alternating"), ("bfloat16", "float16", "int8", "int4"), together=1,
)  # fmt: skip
def test_launches_of_a_narrow_message(workers: int, algorithm: str, wire_dtype: str):
    """Of a worker that owns something; the messages are large enough for that."""
    launches = WIRE_LAUNCHES if workers == WORKERS else LAUNCHES_OF_TWO
    fields: dict[str, Any] = {"algorithm": algorithm, "wire_dtype": wire_dtype, "run_kernels": False}
    alone = steps([(1100, 1050), (7,)], 4, algorithm=algorithm, run_kernels=False)[-1]
    messages = 2 if algorithm == "standard" else 1
    several = [(1100 + i % 3, 1050 - i % 2) for i in range(6)] + [(7,)] * 6
    for shapes in ([(1100, 1050), (7,)], several, [(6, 1100, 1050), (7,)]):
        activity = steps(shapes, 4, communicator=Among(workers), **fields)[-1]
        of_wire = [kernel for kernel in activity.kernels if kernel in WIRE_LAUNCHES]
        assert of_wire == launches * messages
        assert [kernel for kernel in activity.kernels if kernel not in WIRE_LAUNCHES] == alone.kernels
        assert activity.operations == []


@pytest.mark.parametrize(("algorithm", "wire_dtype"), [("standard", "float16"), ("alternating", "int4")])
def test_narrow_messages_move_little_beside_the_step(algorithm: str, wire_dtype: str):
    """At rank 8, where the factors of 128 × 128 are an eighth of the gradient."""
    activity = steps([(128, 128)], 8, communicator=Among(), algorithm=algorithm, wire_dtype=wire_dtype)[-1]
    moved = [one + other for one, other in zip(activity.loaded, activity.stored, strict=True)]
    wire = sum(size for kernel, size in zip(activity.kernels, moved, strict=True) if kernel in WIRE_LAUNCHES)
    assert wire <= MOST_OF_A_STEP * (sum(moved) - wire)


@pytest.mark.parametrize("algorithm", ["standard", "alternating"])
def test_kernels_stay_in_the_memory_of_their_arguments(algorithm: str):
    """Offsets from an argument have 32 bits on AMD, so only an address leads to other memory. No integer overflows."""
    shapes = {"weight": (40, 36), "odd": (21, 17), "bias": (7,)}
    compressor = Compressor(everything(3, backend="triton", algorithm=algorithm), shapes)
    spaces: list[tuple[int, int]] = []
    far: set[str] = set()
    name = ""

    def at_launch(kernel: str, arguments: Sequence[Any]) -> None:
        nonlocal name
        name, spaces[:] = kernel, []
        for argument in [argument for argument in arguments if isinstance(argument, torch.Tensor)]:
            storage = argument.untyped_storage()
            spaces.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        # Addresses are numbers, with a table of distances behind them.
        for base, distances in itertools.pairwise(arguments):
            if isinstance(base, int) and isinstance(distances, torch.Tensor) and distances.dtype == torch.int64:
                places = {base + distance for distance in distances.flatten().tolist()}
                spaces.extend((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.data_ptr() in places)

    def at_access(reached: np.ndarray) -> None:
        inside = np.zeros(reached.shape, dtype=bool)
        for first, last in spaces:
            inside |= (reached >= first) & (reached < last)
        if not inside.all():
            far.add(name)

    # The first step makes the error buffers.
    compressor.compress({name: torch.randn(shape) for name, shape in shapes.items()})
    errors = [matrix.error for matrix in compressor._engine.residuals.matrices.values() if matrix.error is not None]
    with (
        mock.patch.object(interpreter.interpreter_builder, "options", CHECKED),
        watched(at_launch=at_launch, at_access=at_access),
    ):
        # After the last step, which is not finite, error buffers are restored.
        for value in (1.0, float("inf")):
            gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
            gradients["odd"][3, 3] = value
            out = {name: torch.empty(shape) for name, shape in shapes.items()}
            tensors = [*gradients.values(), *out.values(), *errors]
            compressor.decompress(compressor.compress(gradients), out)
    assert out["odd"].isnan().all()
    assert not far


def test_uploads_of_a_loop() -> None:
    """Those of flat buckets are counted with the launches of a step."""
    shapes = {"weight": (16, 12), "odd": (7, 9), "bias": (7,)}
    compressor = Compressor(PowerSGDConfig(rank=2, backend="triton"), shapes)
    gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
    uploads = []
    for _ in range(2):
        with mock.patch.object(table, "on_host", wraps=table.on_host) as on_host:
            for _ in range(3):
                compressor.decompress(compressor.compress(gradients))
        uploads.append(on_host.call_count)
    assert uploads[0] > 0 == uploads[1], uploads


SHAPES = {"two chunks": (300, 12), "bias": (7,)}


def averages() -> list[Tensor]:
    compressor = Compressor(everything(4, backend="triton", explore_every=2), SHAPES)
    return [tensor for seed in range(2) for tensor in step(compressor, gradients(seed, SHAPES)).values()]


def same_in_random_order(seed: int, expected: Sequence[Tensor]) -> bool:
    with random_order(seed):
        return all(map(torch.equal, averages(), expected))


@triton.jit
def arrives_by_number(counter, expected):
    """A mistake: the program with the largest number need not be the last one."""
    return tl.program_id(0) == tl.num_programs(0) - 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_same_bits_in_any_order():
    """Of a launch's programs: the interpreter's own and two random ones, which show a kernel that relies on it."""
    expected = averages()
    assert all(same_in_random_order(seed, expected) for seed in range(2))
    with (
        mock.patch.object(explore, "arrives_last", arrives_by_number),
        mock.patch.object(gram, "arrives_last", arrives_by_number),
    ):
        assert not all(same_in_random_order(seed, expected) for seed in range(2))
