"""The choice between Triton and plain torch."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from powersgd_triton.config import SPARSE, PowerSGDConfig
from powersgd_triton.kernels.availability import triton_version, why_inspected, why_not_triton
from powersgd_triton.kernels.configurations import architecture
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.ops.backend import Backend, Workspace
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.differences import note_infinite_reference
from powersgd_triton.ops.host import apply_host, encode_host, library
from powersgd_triton.ops.torch_backend import TorchBackend


def select_backend(
    config: PowerSGDConfig, device: torch.device, dtypes: Collection[torch.dtype] = (), rank: int = 1
) -> tuple[str, str]:
    """Return ("triton" or "torch", the reason) for gradients on a device, in some dtypes, and their largest rank.

    "auto" selects Triton on CUDA and ROCm devices that support it, else torch. ValueError: The configuration asks for
    Triton, which cannot be used.
    """
    if config.backend == "torch":
        return "torch", "set by the configuration"
    obstacle = why_not_triton(device, dtypes, rank)
    if obstacle is None and config.iterations > 1:
        obstacle = f"the kernels do one iteration a step; the configuration asks for {config.iterations}"
    if obstacle is None and config.backend == "auto" and device.type == "cpu":
        obstacle = "the interpreter is for tests"
    if obstacle is None:
        return "triton", "set by the configuration" if config.backend == "triton" else "the fastest on this device"
    if config.backend == "triton":
        raise ValueError(f"backend 'triton' cannot be used: {obstacle}")
    return "torch", obstacle


def computed_by(config: PowerSGDConfig, device: torch.device) -> str:
    """Return what the bits of a step on a device depend on: the backend, its version, and the kind of processor."""
    try:
        name, _ = select_backend(config, device)
    except ValueError as error:
        return str(error)
    processor = architecture(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    version = triton_version() if name == "triton" else torch.__version__
    compiled = " with C" if name == "torch" and device.type == "cpu" and library() else ""
    return f"{name} {version}{compiled} on {processor}"


def launches_with(version: str) -> str:
    """Return how kernels are launched with a version of Triton, as the doctor says it."""
    why = why_inspected(version)
    return "launches without inspection" if why is None else f"launches take longer: Triton inspects arguments ({why})"


def make_backend(name: str, bucket: Bucket, workspace: Workspace) -> Backend:
    """Return the backend with this name for one bucket."""
    if name == "torch":
        return TorchBackend(bucket)
    # Imported here, because triton may not be installed.
    from powersgd_triton.ops.triton_backend import TritonBackend

    return TritonBackend(bucket, workspace)


class DifferenceCodec(NamedTuple):
    """``encode_reference``, ``apply_reference`` and ``note_infinite_reference``, or what writes the same bits."""

    encode: Callable[[Encoding], None]
    apply: Callable[[Decoding], None]
    note_infinite: Callable[[Tensor, Tensor], None]


def difference_codec(config: PowerSGDConfig, device: torch.device, dtype: torch.dtype) -> DifferenceCodec:
    """Return the functions for copies in ``dtype``."""
    if select_backend(config, device, {dtype})[0] == "torch":
        return DifferenceCodec(encode_host, apply_host, note_infinite_reference)
    # Imported here, because triton may not be installed.
    from powersgd_triton.kernels import differences, sparse

    encode, apply = differences.encode_triton, differences.apply_triton
    if config.quantize == SPARSE:
        encode, apply = sparse.encode_sparse_triton, sparse.apply_sparse_triton
    return DifferenceCodec(encode, apply, differences.note_infinite_triton)
