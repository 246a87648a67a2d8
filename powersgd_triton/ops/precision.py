"""Products of fp32 values in fp32, whatever the user allows for the model's own."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

FULL = ("none", "ieee")
"""Values of ``fp32_precision`` with which products are not rounded to TF32 or bf16."""

_AS_IT_IS = contextlib.nullcontext()
_lock = threading.Lock()
# Number of products that need it under way in all threads, and what gives the user's settings back after the last one.
_products = 0
_user = contextlib.ExitStack()


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Compute products of fp32 values in fp32. In TF32, errors would not contain what was not sent."""
    backends: Any = torch.backends
    settings = (backends.cuda if device.type == "cuda" else backends.mkldnn).matmul
    with _lock:
        # A generator for each product would take a small model's step a few percent of its time.
        return _AS_IT_IS if not _products and settings.fp32_precision in FULL else _in_full()


@contextlib.contextmanager
def _in_full() -> Iterator[None]:
    global _products
    with _lock:
        if not _products:
            _user.enter_context(_suspended())
        _products += 1
    try:
        yield
    finally:
        with _lock:
            _products -= 1
            if not _products:
                _user.close()


@contextlib.contextmanager
def _suspended() -> Iterator[None]:
    """Allow only full precision, for all threads, in the way in which the user has allowed less.

    torch refuses to read ``allow_tf32`` while ``fp32_precision`` says something else.
    """
    backends: Any = torch.backends
    matmuls = backends.cuda.matmul, backends.mkldnn.matmul
    allowed, older = [matmul.fp32_precision for matmul in matmuls], None
    with contextlib.suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    for matmul in matmuls:
        if matmul.fp32_precision not in FULL:
            matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for matmul, before in zip(matmuls, allowed, strict=True):
            if matmul.fp32_precision != before:
                matmul.fp32_precision = before
