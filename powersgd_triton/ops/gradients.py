"""Which tensors may be gradients, and complex gradients as real ones."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.wire_format import ALIGNMENT

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Real dtypes of gradients. A complex gradient has pairs of one of them."""
Gradients = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
Kind = tuple[torch.Size, torch.dtype, torch.device]
"""A gradient's own shape, before a complex one counts as real, its dtype and device."""


def allocate(kinds: Mapping[str, Kind]) -> dict[str, Tensor]:
    """Return new tensors of shapes, dtypes and devices, in one buffer on each device, at multiples of 16 bytes."""
    places: list[tuple[int, int]] = []
    sizes: dict[torch.device, int] = {}
    for shape, dtype, device in kinds.values():
        start, numel = sizes.get(device, 0), shape.numel() * dtype.itemsize
        places.append((start, start + numel))
        sizes[device] = start + -(-numel // ALIGNMENT) * ALIGNMENT
    buffers = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}
    return {
        name: buffers[device][start:end].view(dtype).view(shape)
        for (name, (shape, dtype, device)), (start, end) in zip(kinds.items(), places, strict=True)
    }


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless a tensor is dense, with a floating-point or complex dtype of 16 bits or more a number."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name!r} must be a tensor; got {type(tensor).__name__}")
    # Before the dtype, because integers have no real dtype.
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.to_real() not in DTYPES:
        raise TypeError(f"{name!r} must have a floating-point or complex dtype of 16 bits or more; got {tensor.dtype}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{name!r} must be dense; got {'a nested tensor' if tensor.is_nested else tensor.layout}")


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise ValueError if a tensor is expanded, so that not every element can be written."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"elements of {name!r} share memory, so they cannot be written: clone the expanded tensor")


def real_shape(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape as which a gradient is compressed or averaged: [..., 2k] for a complex tensor [..., k].

    Real and imaginary parts alternate. A complex n × m matrix is compressed as a real n × 2m matrix.
    """
    if not dtype.is_complex:
        return tuple(shape)
    return (*shape[:-1], 2 * shape[-1]) if shape else (2,)


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor as a contiguous real one with its ``real_shape``. A view, if the tensor allows it."""
    if not tensor.is_complex():
        # Kernels read memory, which does not show a lazy negation.
        return tensor.resolve_neg().contiguous()
    pairs = torch.view_as_real(tensor.resolve_conj()).resolve_neg()
    return pairs.reshape(real_shape(tensor.shape, tensor.dtype)).contiguous()


def in_form(real: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the result of ``as_real`` as a view of the shape and the kind, real or complex, that the tensor had."""
    if not dtype.is_complex:
        return real.view(shape)
    # No complex dtype has the range of bf16.
    return torch.view_as_complex((real.float() if real.dtype == torch.bfloat16 else real).view(*shape, 2))


def write_back(real: Tensor, tensor: Tensor) -> None:
    """Write the result of ``as_real(tensor)`` to ``tensor`` itself, unless it is a view of it."""
    if real.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        tensor.copy_(in_form(real, tensor.shape, tensor.dtype))


def by_name(
    gradients: Gradients, layout: Layout, kinds: Mapping[str, Kind], *, same_dtype: bool = True
) -> dict[str, Tensor]:
    """Return a layout's gradients by name. TypeError, ValueError: They have other names, shapes, devices or dtypes.

    ``kinds`` are what is known of them. Without ``same_dtype`` a dtype may be any that is complex or real as known.
    """
    names = list(layout.shapes)
    if isinstance(gradients, Tensor):
        if not gradients.is_contiguous() or gradients.is_conj() or gradients.is_neg():
            raise ValueError(f"a flat buffer must be contiguous and not lazy; got stride {gradients.stride()}")
        buffer = as_real(gradients)
        if gradients.dim() != 1 or buffer.numel() != layout.numel:
            got = f"{gradients.dtype} {tuple(gradients.shape)}"
            raise ValueError(f"a flat buffer must be one-dimensional with {layout.numel} real elements; got {got}")
        named = {s.name: buffer[s.span].view(s.shape) for s in layout.segments}
    elif isinstance(gradients, Mapping):
        missing = [name for name in names if name not in gradients]
        if missing:
            raise ValueError(f"gradients lack {missing[0]!r} ({len(missing)} of {len(names)} missing)")
        unknown = [name for name in gradients if name not in layout.shapes]
        if unknown:
            raise ValueError(f"gradients have unknown names; the first is {unknown[0]!r}")
        named = {name: gradients[name] for name in names}
    else:
        if len(gradients) != len(names):
            raise ValueError(f"expected {len(names)} gradients; got {len(gradients)}")
        named = dict(zip(names, gradients, strict=True))
    device = None
    for name, shape in layout.shapes.items():
        tensor = named[name]
        check_dense(name, tensor)
        kind = kinds.get(name)
        if kind is not None:
            dtype = kind[1].to_real() if isinstance(gradients, Tensor) else kind[1]
            if tensor.dtype != dtype and (same_dtype or tensor.is_complex() != dtype.is_complex):
                raise TypeError(f"{name!r} must have dtype {dtype}; got {tensor.dtype}")
        if real_shape(tensor.shape, tensor.dtype) != shape:
            wanted = f"{shape} real numbers" if tensor.is_complex() else shape
            raise ValueError(f"{name!r} must have shape {wanted}; got {tensor.dtype} {tuple(tensor.shape)}")
        device = device or (kind[2] if kind is not None else tensor.device)
        if tensor.device != device:
            raise ValueError(f"{name!r} must be on {device}; got {tensor.device}")
    return named
