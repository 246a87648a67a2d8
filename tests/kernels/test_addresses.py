"""Which memory kernels reach from which of their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from powersgd_triton import Compressor
from tests.support.checks import everything
from tests.support.device import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="watches the interpreter")

SHAPES = {"weight": (40, 36), "odd": (21, 17), "bias": (7,)}


@pytest.mark.parametrize("algorithm", ["standard", "alternating"])
def test_kernels_stay_in_the_memory_of_their_arguments(algorithm: str):
    """Offsets from an argument have 32 bits on AMD, so only an address leads to other memory. No integer overflows."""
    from tests.support.interpreter import CHECKED, watched

    compressor = Compressor(everything(3, backend="triton", algorithm=algorithm), SHAPES)
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
    compressor.compress({name: torch.randn(shape) for name, shape in SHAPES.items()})
    errors = [matrix.error for matrix in compressor._engine.memory.matrices.values() if matrix.error is not None]
    with (
        mock.patch.object(interpreter.interpreter_builder, "options", CHECKED),
        watched(at_launch=at_launch, at_access=at_access),
    ):
        # After the last step, which is not finite, error buffers are restored.
        for value in (1.0, 2.0, float("inf")):
            gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
            gradients["odd"][3, 3] = value
            out = {name: torch.empty(shape) for name, shape in SHAPES.items()}
            tensors = [*gradients.values(), *out.values(), *errors]
            compressor.decompress(compressor.compress(gradients), out)
    assert out["odd"].isnan().all()
    assert not far
