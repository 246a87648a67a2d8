"""Which backend is chosen for a bucket, and the reasons that are given."""

import importlib.util
import types

import pytest
import torch
import triton

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.kernels.availability import why_not_triton
from powersgd_triton.ops import backends
from powersgd_triton.ops.backends import computed_by, select_backend


def test_backends_by_name(device: torch.device):
    assert select_backend(PowerSGDConfig(backend="torch"), device) == ("torch", "set by the configuration")
    found = select_backend(PowerSGDConfig(backend="triton"), device, {torch.bfloat16}, 4)
    assert found == ("triton", "set by the configuration")
    with pytest.raises(ValueError, match="the kernels do one iteration a step; the configuration asks for 2"):
        select_backend(PowerSGDConfig(backend="triton", iterations=2), device)
    # By itself the configuration takes the kernels on GPUs only.
    found = select_backend(PowerSGDConfig(backend="auto"), device, {torch.float32}, 4)
    interpreted = ("torch", "the interpreter is for tests")
    assert found == (interpreted if device.type == "cpu" else ("triton", "the fastest on this device"))


@pytest.mark.parametrize(
    ("dtypes", "rank", "reason"),
    [
        ({torch.float64}, 1, "the kernels take float32, bfloat16 and float16 gradients; these are torch.float64"),
        ({torch.float16, torch.float32}, 1,
         "gradients of one bucket must be of one dtype; these are torch.float16, torch.float32"),
        ({torch.float32}, 257, "the kernels take ranks up to 256; this one is 257"),
    ],
    ids=["fp64", "several dtypes", "rank"],
)  # fmt: skip
def test_what_the_kernels_do_not_take(dtypes: set[torch.dtype], rank: int, reason: str, device: torch.device):
    assert why_not_triton(device, dtypes, rank) == reason
    assert why_not_triton(device, {torch.float32}, 256) is None
    assert select_backend(PowerSGDConfig(backend="auto"), device, dtypes, rank)[0] == "torch"
    with pytest.raises(ValueError, match="backend 'triton' cannot be used: "):
        select_backend(PowerSGDConfig(backend="triton"), device, dtypes, rank)


def test_where_the_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch):
    cuda, run_on = torch.device("cuda"), "the kernels run on CUDA and ROCm devices; these gradients are on"
    assert why_not_triton(torch.device("meta")) == f"{run_on} meta"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert why_not_triton(torch.device("cpu")) == f"{run_on} the CPU"
    for hip, capability, version, expected in (
        (None, (7, 5), "3.5.0", "the kernels need compute capability 8.0; this device has 7.5"),
        (None, (8, 0), "3.4.0", "the kernels need triton 3.5 or newer; this is 3.4.0"),
        ("7.0", (8, 0), "3.7.1", "the kernels need triton 3.9 or newer on ROCm; this is 3.7.1"),
    ):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        monkeypatch.setattr(triton, "__version__", version)
        assert why_not_triton(cuda) == expected
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert why_not_triton(cuda) == "triton is not installed"
    # Nobody looks for it on the CPU, where each step asks.
    assert why_not_triton(torch.device("cpu")) == f"{run_on} the CPU"


def test_what_bits_depend_on(monkeypatch: pytest.MonkeyPatch):
    """The number of multiprocessors is not among it."""
    capability = torch.backends.cpu.get_cpu_capability()
    here = computed_by(PowerSGDConfig(backend="triton"), torch.device("cpu"))
    assert here == f"triton {triton.__version__} on {capability}"
    config, gpu = PowerSGDConfig(), torch.device("cuda", 0)
    for library, compiled in (("built", " with C"), (None, "")):
        monkeypatch.setattr(backends, "library", lambda library=library: library)
        assert computed_by(config, torch.device("cpu")) == f"torch {torch.__version__}{compiled} on {capability}"
    monkeypatch.setattr(torch.version, "hip", None)
    for major, minor, backend in ((8, 0, f"triton {triton.__version__}"), (7, 5, f"torch {torch.__version__}")):
        properties = types.SimpleNamespace(major=major, minor=minor, multi_processor_count=major)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=(major, minor): found)
        assert computed_by(config, gpu) == f"{backend} on sm_{major}{minor}"
    # Each worker is told why by itself.
    assert "cannot be used" in computed_by(PowerSGDConfig(backend="triton", iterations=2), torch.device("cpu"))
