"""Exploration in the kernel and in C against the reference, and what all promise."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from powersgd_triton import PowerSGDConfig
from powersgd_triton.kernels.explore import explore_numel, explore_triton
from powersgd_triton.layout.constants import CARRY
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.backend import Workspace
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.explore import explore, explore_reference
from powersgd_triton.ops.host import library
from powersgd_triton.ops.triton_backend import TritonBackend

EVERY = 3
SHAPES = {"wide": (40, 300), "tall": (90, 33), "twin": (90, 33), "small": (5, 4), "full": (2, 50), "one": (1, 7)}


def explored(bucket: Bucket, step: int, way: str, finite: bool = True) -> list[list[Tensor]]:
    """Copies of the bases after the reference and after ``way``, from the same ones, which stay as they are."""
    before, device, found = bucket.basis.clone(), bucket.basis.device, []
    for each in ("reference", way):
        if each == "C":
            explore(bucket, step, where=finite)
        elif each == "kernel":
            table, rank = TritonBackend(bucket, Workspace())._table, max(g.rank for g in bucket.layout.groups)
            number = torch.tensor(step, device=device)
            flag = torch.tensor(int(finite), dtype=torch.int32, device=device)
            parts = torch.full((explore_numel(table, rank),), torch.nan, device=device)
            explore_triton(table, number, flag, rank, EVERY, parts=parts, out=bucket.basis)
            # Ready for the next launch.
            assert not table.Q.progress.any()
        else:
            explore_reference(bucket, step, where=torch.tensor(finite, device=device))
        found.append([basis.clone() for bases in bucket.right(bucket.basis) for basis in bases])
        bucket.basis.copy_(before)
    return found


@pytest.mark.parametrize("rank", [1, 3, 16, 40])
def test_the_kernel_explores_as_the_reference_does(rank: int, device: torch.device) -> None:
    check(rank, device, "kernel")


@pytest.mark.skipif(not hasattr(library(), "powersgd_explore"), reason="needs a C compiler at installation")
@pytest.mark.parametrize("rank", [1, 3, 16, 40])
def test_c_explores_as_the_reference_does(rank: int) -> None:
    with mock.patch("powersgd_triton.ops.explore.explore_reference", side_effect=AssertionError):
        check(rank, torch.device("cpu"), "C")


def check(rank: int, device: torch.device, way: str) -> None:
    """Nothing changes after a step that is not finite."""
    config = PowerSGDConfig(rank=rank, min_compression_rate=0, explore_every=EVERY)
    bucket = Bucket(Layout.build(SHAPES, config), torch.float32, device, config)
    generator = torch.Generator().manual_seed(rank)
    for bases in bucket.right(bucket.basis):
        bases.copy_(torch.linalg.qr(torch.randn(bases.shape, generator=generator))[0])
    old = [basis.clone() for bases in bucket.right(bucket.basis) for basis in bases]
    segments = [segment for group in bucket.layout.groups for segment in group.segments]
    changed = dict.fromkeys(SHAPES, 0)
    for step in range(EVERY):
        for kept in explored(bucket, step, way, finite=False) if way == "kernel" else []:
            assert all(torch.equal(before, after) for before, after in zip(old, kept, strict=True))
        for segment, before, expected, got in zip(segments, old, *explored(bucket, step, way), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
            assert torch.equal(got[:, :-1], before[:, :-1])
            changed[segment.name] += not torch.equal(got, before)
            # Orthonormal, and orthogonal to the old last column but for its share.
            identity = torch.eye(segment.rank, device=device)
            torch.testing.assert_close(got.T @ got, identity, rtol=0, atol=2e-5)
            if not torch.equal(got, before):
                assert float((got[:, -1] @ before[:, -1]).abs()) <= CARRY * 16
    for segment in segments:
        # Once each, unless the basis sees everything. A random direction may lie in the basis of a small matrix.
        sees_all = segment.rank == min(segment.n, segment.m)
        assert changed[segment.name] <= 1 - sees_all
        assert changed[segment.name] == 1 or sees_all or segment.name == "small"
