"""``python -m powersgd_triton doctor``: show versions, devices and the selected backend, and test a step."""

import argparse
import importlib
import importlib.metadata
import platform
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import powersgd_triton
from powersgd_triton import Compressor, PowerSGDConfig, autoload
from powersgd_triton.ops import host
from powersgd_triton.ops.backends import launches_with, select_backend

STEPS = 8
SHAPES = {"weight": (64, 48), "bias": (64,)}
CONFIG = PowerSGDConfig(rank=4)
CPU = torch.device("cpu")
PASSED = """All checks passed (one process, small matrices).
Not checked: communication between workers, the adapters, and speed."""
ORTHONORMAL_TOLERANCE = 1e-5
# In units of max|M|. In each step, M = G + E, the product P̂ Q̄ᵀ of rank 4 and the subtraction make a few roundings.
CONSERVATION_TOLERANCE = 8 * STEPS * torch.finfo(torch.float32).eps

Check = tuple[str, bool, str]
"""Result of one check: its name, whether it passed, and the figure that it measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the command has none."""


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001
    """Print the report. Return 1 if something is broken, else 0."""
    broken = 0
    print("Versions")
    for name, version, fine in versions():
        print(f"  {name:<16} {version}")
        broken += not fine
    print("\nDevices")
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in [CPU, *gpus]:
        print(f"  {device!s:<16} {_describe(device)}")
    print(f"\nDistributed backends\n  {', '.join(distributed_backends()) or 'none'}")
    # One device of each type is enough, since the backend depends on the type only.
    for device in [CPU, *gpus[:1]]:
        print(f"\nBackend and self-test on {device}")
        for name, passed, detail in checks(device):
            print(f"  {'ok' if passed else 'FAILED':<7} {name}: {detail}")
            broken += not passed
    print(f"\n{f'{broken} failed; see above.' if broken else PASSED}")
    return int(broken > 0)


def versions() -> Iterator[tuple[str, str, bool]]:
    """Yield (name, version or problem, whether it is fine) for this package and its dependencies."""
    yield "powersgd_triton", powersgd_triton.__version__, True
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "python", python, True
    cuda = torch.version.cuda or torch.version.hip
    yield "torch", f"{torch.__version__}{f' (built for {cuda})' if cuda else ''}", True
    yield "numpy", *_imported("numpy", needed=True)
    triton, fine = _imported("triton", needed=False)
    yield "triton", f"{triton}; {launches_with(triton)}" if _installed("triton") and fine else triton, fine
    codec = "compiled" if host.library() else "plain torch, slower: not compiled at installation, or not to be loaded"
    yield "CPU codec", codec, True
    # DeepSpeed is not imported, since that takes seconds and prints messages. Only the adapter needs it.
    yield "deepspeed", _installed("deepspeed") or "not installed", True
    section = "works in unchanged programs" if autoload.is_active() else f"is ignored ({autoload.VARIABLE}=0?)"
    yield "ds_config.json", f"a section {autoload.SECTION!r} {section}", True


def distributed_backends() -> list[str]:
    """Return those that this build of torch.distributed supports."""
    # "undefined" is a placeholder, and "fake" sends nothing: torch's own tests use it.
    known = dist.Backend.backend_list
    return [name for name in known if name not in ("undefined", "fake") and dist.is_backend_available(name)]


def checks(device: torch.device) -> Iterator[Check]:
    """Select the backend and test steps in one process. A check that raises an exception has failed."""
    try:
        name, reason = select_backend(CONFIG, device)
        yield "backend 'auto'", True, f"{name}: {reason}"
        yield from _steps(device)
    except Exception as error:
        yield "steps", False, f"{type(error).__name__}: {error}"


def _steps(device: torch.device) -> Iterator[Check]:
    """Check steps of one compressor: of zeros, ordinary ones, one with an infinite element, and one after it."""
    compressor = Compressor(CONFIG, SHAPES)
    zero = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    zeros = [_step(compressor, zero)[0]["weight"] for _ in range(2)]
    owed = torch.zeros(SHAPES["weight"], dtype=torch.float64, device=device)
    skews, sizes, differences = list[Tensor](), list[Tensor](), list[Tensor]()
    for index in range(STEPS):
        gradients = _gradients(index, device)
        averaged, P_hat = _step(compressor, gradients)
        owed += gradients["weight"].double() - averaged["weight"].double()
        error = compressor.error()["weight"]
        sizes.append(gradients["weight"].abs().max() + error.abs().max())
        skews.append(P_hat.T @ P_hat - torch.eye(P_hat.shape[1], dtype=P_hat.dtype, device=device))
        differences.append(averaged["bias"] - gradients["bias"])
    lost, skew, off = _largest([owed - error.to(owed)]) / _largest(sizes), _largest(skews), _largest(differences)
    yield "orthonormal factors", skew <= ORTHONORMAL_TOLERANCE, f"max|PᵀP − I| = {skew:.1e} in {STEPS} steps"
    yield "nothing lost", lost <= CONSERVATION_TOLERANCE, f"max|ΣĜ + E − ΣG| = {lost:.1e} of max|M|"
    exact = "exact average of tensors that are not compressed"
    yield exact, off == 0, f"max|difference| = {off:.1e}"
    fine = not any(map(torch.any, zeros)) and _finite(averaged) and bool(averaged["weight"].any())
    seen = "zeros, and gradients after it" if fine else "nonzero, or no gradient after it, or NaN"
    yield "zero gradient", fine, seen
    gradients["weight"][3, 5] = torch.inf
    fine = bool(_step(compressor, gradients)[0]["weight"].isnan().all())
    yield "non-finite gradient", fine, "reaches the optimizer as NaN" if fine else "is hidden from the optimizer"
    fine = _finite(_step(compressor, _gradients(STEPS, device))[0])
    yield "step after it", fine, "finite" if fine else "not finite"


def _step(compressor: Compressor, gradients: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the averaged gradients, and P̂ of the weight in fp64."""
    compressed = compressor.compress(gradients)
    averaged = {name: torch.full_like(gradient, torch.nan) for name, gradient in gradients.items()}
    compressor.decompress(compressed, out=averaged)
    return averaged, compressed.factors()["weight"][0].double()


def _gradients(seed: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def _largest(tensors: list[Tensor]) -> float:
    """Return max|·|. It is NaN if an element is, which fails every comparison."""
    return float(torch.stack(tensors).abs().max())


def _finite(gradients: dict[str, Tensor]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients.values())


def _describe(device: torch.device) -> str:
    if device == CPU:
        threads = torch.get_num_threads()
        return f"{threads} thread{'s' if threads > 1 else ''}"
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _imported(package: str, *, needed: bool) -> tuple[str, bool]:
    """Return (version or problem, whether it is fine)."""
    version = _installed(package)
    if version is None:
        return "not installed", not needed
    try:
        importlib.import_module(package)
    except Exception as error:
        return f"{version}, but importing it fails: {type(error).__name__}: {error}", False
    return version, True
