"""Files in tests/data/saved-VERSION load, and training goes on from the errors and bases in them.

``python tests/core/test_saved_by_earlier_versions.py FOLDER`` writes such files with the version on PYTHONPATH.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig, checkpoint
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook

FOLDERS = sorted(Path(__file__).parents[1].joinpath("data").glob("saved-*"))
SHAPES = {"weight": (10, 6), "kernel": (5, 3, 2), "bias": (10,)}
STEPS, RANK = 4, 2
Matrices = Mapping[str, Mapping[str, Tensor]]


def compressor() -> Compressor:
    return Compressor(PowerSGDConfig(rank=RANK, min_compression_rate=0, backend="torch"), SHAPES)


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8))


def convolutions(memory_format: torch.memory_format) -> nn.Module:
    """With ``channels_last`` no matrix is contiguous. The sizes of the first one are equal in both orders."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 5, 2), nn.Flatten())
    linear = nn.Linear(45, 4)
    model = body.append(linear)
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    if memory_format == torch.channels_last:
        linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    return model


def hook_state(model: nn.Module) -> PowerSGDState:
    options: dict[str, Any] = {"min_compression_rate": 0, "backend": "torch"}
    return PowerSGDState(None, RANK, start_powerSGD_iter=0, module=model, **options)


def train(
    model: nn.Module, state: PowerSGDState, steps: range, shape: tuple[int, ...] = (7, 6), **options: Any
) -> dict[str, Tensor]:
    """Train with DDP; this worker's own gradients in the last step."""
    own: dict[str, Tensor] = {}
    replica = DistributedDataParallel(model, **options)
    replica.register_comm_hook(state, powerSGD_hook)
    handles = [
        parameter.register_hook(lambda gradient, name=name: own.__setitem__(name, gradient.clone()))
        for name, parameter in model.named_parameters()
    ]
    for step in steps:
        model.zero_grad()
        inputs = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        replica(inputs).square().sum().backward()
    for handle in handles:
        handle.remove()
    return own


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def check_restored(errors: Mapping[str, Tensor], matrices: Matrices, saved: Matrices) -> None:
    """That errors and bases are those in the file."""
    assert errors.keys() == matrices.keys() == saved.keys()
    for name, parts in saved.items():
        assert parts["error"].any()
        assert torch.equal(errors[name].reshape(parts["error"].shape), parts["error"])
        assert torch.equal(matrices[name]["basis"], parts["basis"])


def check_step(
    own: Mapping[str, Tensor], averages: Mapping[str, Tensor], left: Mapping[str, Tensor], saved: Matrices
) -> None:
    """That a step of one worker began with the errors and bases in the file."""
    for name, average in averages.items():
        if name not in saved:
            assert torch.equal(average, own[name])
            continue
        error, basis = saved[name]["error"].double(), saved[name]["basis"].double()
        M = own[name].reshape(error.shape).double() + error
        P_hat = torch.linalg.qr(M @ basis)[0]
        expected = P_hat @ (P_hat.mT @ M)
        torch.testing.assert_close(average.reshape(error.shape).double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(left[name].reshape(error.shape).double(), M - expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_compressor_goes_on_from_a_file(folder: Path, suffix: str) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    saved = checkpoint.load(folder / f"compressor{suffix}")
    ours = compressor()
    ours.load_state_dict(saved)
    assert ours.iteration == saved["iteration"] == STEPS
    check_restored(ours.error(), ours.state_dict()["matrices"], saved["matrices"])
    own = gradients(STEPS)
    averages = ours.decompress(ours.compress(own))
    assert isinstance(averages, Mapping)
    assert ours.iteration == STEPS + 1
    check_step(own, averages, ours.error(), saved["matrices"])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["ddp.pt", "ddp.pickle"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_ddp_goes_on_from_a_file(folder: Path, name: str) -> None:
    # The pickle is of the same state.
    saved = checkpoint.load(folder / "ddp.pt")
    model = network()
    if name == "ddp.pickle":
        state: PowerSGDState = pickle.loads((folder / name).read_bytes())
    else:
        state = hook_state(model)
        state.load_state_dict(saved)
    assert state.iter == saved["iteration"] == STEPS
    check_restored(state.error(), state.state_dict()["matrices"], saved["matrices"])
    own = train(model, state, range(STEPS, STEPS + 1))
    averages = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert state.iter == STEPS + 1
    check_step(own, averages, state.error(), saved["matrices"])


IMAGES = (7, 3, 6, 6)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_errors_in_the_order_of_memory_are_put_into_that_of_the_shape(memory_format: torch.memory_format) -> None:
    """The file is of one step of a model in channels_last, whose error is orthogonal to the average: (G − E)ᵀ E = 0."""
    saved = checkpoint.load(FOLDERS[0] / "channels_last.pt")
    assert saved["format_version"] == 2
    model = convolutions(memory_format)
    state = hook_state(model)
    state.load_state_dict(saved)
    fresh = convolutions(memory_format)
    own = train(fresh, hook_state(fresh), range(1), IMAGES)
    errors = state.error()
    # Where the sizes are equal, only the parameter's own order says how it was saved.
    known = ["2.weight", "4.weight"] + ["0.weight"] * (memory_format == torch.channels_last)
    bases = state.state_dict()["matrices"]
    for name in known:
        G, E = own[name].flatten(1).double(), errors[name].double()
        assert E.norm() > 0.1 * G.norm()
        if name == "4.weight":
            # It was compressed transposed, so its basis does not fit.
            assert "basis" not in bases[name]
            G, E = G.T, E.T
        sent = G - E
        assert (sent.T @ E).norm() <= 1e-4 * E.norm() * sent.norm()
        assert torch.linalg.matrix_rank(sent, rtol=1e-4) == RANK
        if name != "4.weight":
            basis, _ = torch.linalg.qr(bases[name]["basis"].double())
            torch.testing.assert_close(sent @ basis @ basis.T, sent, rtol=1e-4, atol=1e-4)
    before = {name: error.clone() for name, error in errors.items()}
    own = train(model, state, range(1, 2), IMAGES)
    gradients = dict(model.named_parameters())
    for name, error in state.error().items():
        gradient = gradients[name].grad
        assert gradient is not None
        torch.testing.assert_close(
            error + gradient.flatten(1), before[name] + own[name].flatten(1), rtol=1e-5, atol=1e-5
        )


@pytest.mark.usefixtures("group")
def test_order_of_memory_is_refused_where_parameters_have_no_names() -> None:
    saved = checkpoint.load(FOLDERS[0] / "channels_last.pt")
    model = convolutions(torch.channels_last)
    options: dict[str, Any] = {"min_compression_rate": 0, "start_powerSGD_iter": 0}
    fresh = PowerSGDState(None, RANK, **options)
    fresh.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"saved by version 0\.1\.0"):
        train(model, fresh, range(1, 2), IMAGES)
    running = PowerSGDState(None, RANK, **options)
    train(model, running, range(1), IMAGES)
    with pytest.raises(ValueError, match=r"saved by version 0\.1\.0"):
        running.load_state_dict(saved)


def test_there_are_files() -> None:
    assert FOLDERS


def write(folder: Path) -> None:
    """Write what these tests read."""
    ours = compressor()
    for step in range(STEPS):
        ours.decompress(ours.compress(gradients(step)))
    for suffix in (".pt", ".safetensors"):
        checkpoint.save(ours.state_dict(), folder / f"compressor{suffix}")
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        model = network()
        state = hook_state(model)
        train(model, state, range(STEPS))
        checkpoint.save(state.state_dict(), folder / "ddp.pt")
        (folder / "ddp.pickle").write_bytes(pickle.dumps(state))
        model = convolutions(torch.channels_last)
        state = hook_state(model)
        train(model, state, range(1), IMAGES)
        checkpoint.save(state.state_dict(), folder / "channels_last.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
