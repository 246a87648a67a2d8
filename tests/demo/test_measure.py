"""The demo's counts of bytes."""

from __future__ import annotations

import types

import pytest

from powersgd_triton.comm import exchange
from powersgd_triton.demo.measure import Traffic
from powersgd_triton.layout.wire_format import FORMATS, WirePlan


@pytest.mark.parametrize("owners", [1, 4])
def test_a_narrow_message_counts_like_one_all_reduce(owners: int, monkeypatch: pytest.MonkeyPatch):
    """Whether it takes one all-gather of two workers, or an all-to-all and an all-gather."""
    monkeypatch.setattr(exchange, "exchange_parts", lambda *_: iter(()))
    wire = types.SimpleNamespace(plan=WirePlan.build(FORMATS["int4"], [(1, 64, 4)], 3, 4, owners))
    before, traffic = exchange.exchange_parts, Traffic()
    with traffic.counting():
        list(exchange.exchange_parts(wire))  # type: ignore[call-arg]
    assert traffic.sent == owners * wire.plan.size
    assert exchange.exchange_parts is before
