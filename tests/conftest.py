"""What must be chosen before torch and triton are imported: one thread, and Triton's interpreter without a GPU."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Nearly all matrices are small: threads would only wait for each other, and for those of tests that run beside these.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# So that a failing assert in a helper shows its values, as in a test.
pytest.register_assert_rewrite("tests.support")

# After the choice above, which it reads.
from tests.support.device import EMULATED, INTERPRETED  # noqa: E402
from tests.support.exchanges import bytes_decide  # noqa: E402

bytes_decide()

if INTERPRETED:
    from tests.support.interpreter import make_exact, make_faster, random_order

    make_faster()
    make_exact()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--program-order", type=int, help="a seed: programs run in random orders in the interpreter")


@pytest.fixture(autouse=True, scope="session")
def program_order(request: pytest.FixtureRequest) -> Iterator[None]:
    seed = request.config.getoption("program_order")
    with random_order(seed) if INTERPRETED and seed is not None else contextlib.nullcontext():
        yield


def pytest_collection() -> None:
    # Nothing that is imported is garbage: looking for it takes a quarter of the time that imports take.
    gc.disable()


def pytest_collection_finish() -> None:
    """All that was imported stays: garbage, and tensors that are alive, are looked for among what tests make."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Extension modules complain of what is not collected when Python ends."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test's random numbers do not depend on the tests that ran before it in the same process."""
    torch.manual_seed(0)


@pytest.fixture(
    params=[
        pytest.param(
            "cpu", marks=pytest.mark.skipif(not (INTERPRETED or EMULATED), reason="kernels are compiled for the GPU")
        ),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(INTERPRETED or EMULATED or not torch.cuda.is_available(), reason="there is no GPU"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the Triton kernels run: in the interpreter, or on the GPU."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def one_worker(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
