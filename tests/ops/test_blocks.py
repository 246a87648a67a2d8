"""The size of the blocks in which the reference processes matrices."""

from __future__ import annotations

import pytest
import torch

from powersgd_triton.ops.blocks import BLOCK_BYTES, FEWEST_ROWS, block_bytes, blocks


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_each_thread_has_a_block_that_fits_its_cache(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    size = block_bytes(torch.device("cpu"))
    assert size == threads * BLOCK_BYTES["cpu"] <= threads << 20
    matrix = torch.empty(8192, 1024)
    sizes = [4 * block.numel() for _, _, (block,) in blocks(4, [matrix])]
    assert sum(sizes) == 4 * matrix.numel()
    assert size / 2 < max(sizes) <= size


def test_blocks_of_wide_matrices_have_several_rows() -> None:
    matrix = torch.empty(20, BLOCK_BYTES["cpu"] * torch.get_num_threads() // 4)
    rows = [block.shape[1] for _, _, (block,) in blocks(4, [matrix])]
    assert rows == [FEWEST_ROWS, FEWEST_ROWS, 20 - 2 * FEWEST_ROWS]
