"""The demo's counts of bytes."""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist

from powersgd_triton.comm import exchange
from powersgd_triton.demo.measure import Traffic
from powersgd_triton.layout.wire_format import FORMATS, WirePlan

ELEMENTS = 100


def carry_nothing(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Replace collectives by functions that do nothing, as one of so many workers."""
    monkeypatch.setattr(dist, "get_world_size", lambda _: workers)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    for name in ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, lambda *_: None)


def exchange_narrow_message(workers: int) -> int:
    """As many bytes as an all-reduce of the message would have."""
    owners = 1 if workers == 2 else workers

    plan = WirePlan.build(FORMATS["int4"], [(1, 64, 4)], 3, 4, owners)
    wire = types.SimpleNamespace(plan=plan, **dict.fromkeys(("encode", "reduce", "decode"), lambda *_, **__: None))
    communicator = types.SimpleNamespace(
        world_size=workers,
        index=0,
        # Looked up at the call, as the communicator does.
        all_gather=lambda gathered, tensor: dist.all_gather_into_tensor(gathered, tensor),
        all_to_all=lambda received, sent: dist.all_to_all_single(received, sent),
    )
    content = torch.zeros(8)
    list(exchange.exchange_parts(wire, content, None, content, communicator))  # type: ignore[arg-type]
    size: int = wire.plan.size
    return owners * size


@pytest.mark.parametrize("workers", [2, 4])
def test_a_narrow_message_counts_like_one_all_reduce(workers: int, monkeypatch: pytest.MonkeyPatch):
    """Whether it takes one all-gather of two workers, or an all-to-all and an all-gather."""
    carry_nothing(monkeypatch, workers)
    before = exchange.exchange_parts
    for traffic in (Traffic(), Traffic(["reduce_scatter_tensor"])):
        with traffic.counting():
            expected = exchange_narrow_message(workers)
        assert traffic.as_all_reduces == expected
        assert traffic.sent == traffic.received == 2 * (workers - 1) * expected / workers
        assert exchange.exchange_parts is before


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bytes_are_those_of_a_ring(workers: int, monkeypatch: pytest.MonkeyPatch):
    carry_nothing(monkeypatch, workers)
    tensor, traffic = torch.zeros(ELEMENTS), Traffic()
    with traffic.counting():
        dist.all_reduce(tensor)
        assert traffic.as_all_reduces == (4 * ELEMENTS if workers > 1 else 0)
        assert traffic.sent == traffic.received == 2 * (workers - 1) * 4 * ELEMENTS // workers
        dist.all_gather_into_tensor(torch.zeros(workers * ELEMENTS), tensor)
    assert traffic.as_all_reduces == (4 * ELEMENTS * (1 + workers / 2) if workers > 1 else 0)
    traffic.reset()
    assert traffic.sent == traffic.received == traffic.as_all_reduces == 0
    # A reduce-scatter like a whole all-reduce, since what gathers the parameters is not named.
    named = Traffic(["reduce_scatter_tensor"])
    with named.counting():
        dist.all_gather_into_tensor(torch.zeros(workers * ELEMENTS), tensor)
        assert named.sent == 0
        dist.reduce_scatter_tensor(torch.zeros(ELEMENTS), torch.zeros(workers * ELEMENTS))
    assert named.as_all_reduces == (workers * 4 * ELEMENTS if workers > 1 else 0)
