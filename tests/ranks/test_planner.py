"""The planner: integers and floats only."""

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powersgd_triton import PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import compressed_rank, tensor_bytes
from powersgd_triton.ranks.planner import Planner, Spectrum, budget, sent_bytes
from powersgd_triton.ranks.report import RankReport

MODEL: dict[str, tuple[int, ...]] = {"a": (96, 96), "b": (96, 96), "c": (64, 400), "norm": (96,), "small": (3, 4)}


def config(compression: float = 6.0, **fields: Any) -> PowerSGDConfig:
    return PowerSGDConfig(compression=compression, **{"wire_dtype": "fp32", **fields})


def test_the_first_plan_has_the_largest_common_rank_and_what_is_left_over():
    ranks = Planner(MODEL, config()).starting_ranks()
    common = min(ranks.values())
    assert ranks.keys() == {"a", "b", "c"}
    assert set(ranks.values()) <= {common, common + 1}
    assert sent_bytes(MODEL, ranks, config()) <= budget(MODEL, config())
    more = dict.fromkeys(ranks, common + 1)
    assert sent_bytes(MODEL, more, config()) > budget(MODEL, config())
    numel = sum(math.prod(shape) for shape in MODEL.values())
    assert ranks == Planner(MODEL, PowerSGDConfig(bytes_per_step=4 * numel // 6, wire_dtype="fp32")).starting_ranks()
    whole = Planner(MODEL, PowerSGDConfig(bytes_per_step=4 * numel, wire_dtype="fp32")).starting_ranks()
    assert whole == {name: compressed_rank(MODEL[name], config()) for name in whole}
    assert Planner({"norm": (5,)}, config(1.0)).starting_ranks() == Planner({}, config()).starting_ranks() == {}


def test_bytes_count_the_width_and_what_is_exact():
    # 96 rows of 3 columns in 8 bits with a scale each, on both sides; 64 and 400 rows, of which a column has 1 and 4.
    ranks = {"a": 3, "b": 3, "c": 2}
    expected = 2 * (2 * 96 * 3 + 2 * 2 * 3) + (464 * 2 + 2 * 5 * 2) + 4 * (96 + 12)
    assert sent_bytes(MODEL, ranks, config(wire_dtype="int8")) == expected
    assert sent_bytes(MODEL, {}, config()) == 4 * sum(math.prod(shape) for shape in MODEL.values())


@pytest.mark.parametrize("limit", [None, 24])
def test_ranks_are_limited_whatever_the_budget_allows(limit: int | None):
    shapes = {"wide": (768, 768), "wider": (3072, 768), "narrow": (16, 4096), "norm": (768,)}
    budgeted = PowerSGDConfig(compression=5, max_rank=limit)
    ranks = Planner(shapes, budgeted).starting_ranks()
    highest = limit or 64
    assert ranks == {"wide": highest, "wider": highest, "narrow": 16}
    assert Planner(shapes, budgeted).allot(ranks, {"wide": 9.0, "wider": 1.0, "narrow": 1.0}) == ranks
    report = RankReport.of(Layout.build(shapes, budgeted).with_ranks(lambda s: ranks[s.name]), budgeted, {})
    assert report.unused == budget(shapes, budgeted) - report.bytes_per_step > 0
    assert f"Ranks are limited to {highest} columns. This leaves {report.unused:,.0f} of" in str(report)


def test_a_budget_that_is_too_small_says_what_would_do():
    with pytest.raises(ValueError, match=r"the budget is 500 bytes a step, but .* sends 3,824, 432 of them"):
        Planner(MODEL, PowerSGDConfig(bytes_per_step=500, wire_dtype="fp32")).starting_ranks()
    for width in (64, 96, 128, 768):
        model = {"weight": (3 * width, width), "bias": (width,)}
        for fields in ({}, {"wire_dtype": "int8"}, {"bypass": "int8"}):
            with pytest.raises(ValueError, match="is 1 bytes a step") as caught:
                Planner(model, PowerSGDConfig.from_dict({"bytes_per_step": 1, **fields}), workers=4).starting_ranks()
            sent, largest = re.findall(r"sends ([\d,]+).*a compression of at most ([\d.]+)", str(caught.value))[0]
            for said in ({"bytes_per_step": int(sent.replace(",", ""))}, {"compression": float(largest)}):
                enough = PowerSGDConfig.from_dict({**said, **fields})
                assert Planner(model, enough, workers=4).starting_ranks() == {"weight": 1}


def test_demand_and_share():
    # All columns alike: ‖M‖²/φ = 4 · 4 / (r · 0.02), of which one more saves nearly 1 / r.
    assert Spectrum((0.02,) * 5, 4.0).demand == pytest.approx(4.0**2 / 0.02)
    # Steeper spectra gain less by another column.
    assert Spectrum((0.09, 0.004, 0.003, 0.003), 1.0).demand < Spectrum((0.025,) * 4, 1.0).demand
    assert Spectrum((0.04, 0.01), 0.5).share == pytest.approx(0.1)
    assert Spectrum((), 0.0).share == Spectrum((0.0, 0.0), 0.0).demand == 0
    # Nothing is learnt from overflows.
    for energies, size in (((0.0, 0.0), 1.0), ((math.nan, 1.0), 2.0), ((1.0, 0.5), math.inf), ((5e-324,), 1e308)):
        assert not math.isfinite(Spectrum(energies, size).demand)


def test_ranks_become_as_the_root_of_demand_for_bytes():
    demands, ranks = {"a": 1.0, "b": 4.0, "c": 9.0}, Planner(MODEL, config()).starting_ranks()
    for _ in range(8):
        ranks = Planner(MODEL, config()).allot(ranks, demands)
    columns = {name: tensor_bytes(MODEL[name], 1, config()) for name in ranks}
    wanted = {name: math.sqrt(demands[name] / columns[name]) for name in ranks}
    scale = sum(columns[name] * rank for name, rank in ranks.items()) / sum(columns[n] * w for n, w in wanted.items())
    # Where no column of "c" fits any more, two of the others may.
    assert all(abs(rank - scale * wanted[name]) < 2 for name, rank in ranks.items())
    assert Planner(MODEL, config()).allot(ranks, demands) == ranks
    # A plan changes ranks by a third.
    found = Planner(MODEL, config()).allot(ranks, {"a": 1e9, "b": 1.0, "c": 1.0})
    assert found["a"] == ranks["a"] * 4 // 3
    assert all(found[name] >= rank * 2 // 3 for name, rank in ranks.items())
    # What wants nothing gets one column in the end.
    for _ in range(9):
        ranks = Planner(MODEL, config()).allot(ranks, {"a": 0.0, "b": 1.0, "c": 1.0})
    assert ranks["a"] == 1


def test_plans_do_not_depend_on_the_size_of_gradients():
    ranks, plans = Planner(MODEL, config()).starting_ranks(), []
    for size in (1e-20, 1.0, 1e20):
        spectra = [Spectrum((energy * size, 0.1 * size), 3 * size) for energy in (0.4, 1.0, 2.0)]
        demands = {name: spectrum.demand for name, spectrum in zip(ranks, spectra, strict=True)}
        plans.append(Planner(MODEL, config()).allot(ranks, demands))
    assert plans[0] == plans[1] == plans[2] != ranks


def test_tensors_that_were_added_are_made_room_for_at_once():
    tight = PowerSGDConfig(bytes_per_step=20_000, wire_dtype="fp32")
    ranks = Planner(MODEL, tight).starting_ranks()
    grown = {**MODEL, "new bias": (2000,)}
    found = Planner(grown, tight).allot(ranks, dict.fromkeys(ranks, 1.0))
    assert any(found[name] < rank * 2 // 3 for name, rank in ranks.items())
    assert sent_bytes(grown, found, tight) <= 20_000


sizes = st.integers(1, 200)
shapes = st.one_of(st.tuples(sizes, sizes), st.tuples(sizes), st.tuples(sizes, st.integers(1, 9), st.integers(1, 9)))
models = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), shapes, max_size=8)
widths = st.sampled_from(["fp32", "bf16", "fp16", "int8", "int4"])


@given(models, widths, st.floats(1, 60), st.sampled_from(["standard", "alternating"]), st.data())
@settings(deadline=None)
def test_any_plan_keeps_to_the_budget_and_uses_it(
    model: dict[str, tuple[int, ...]], width: str | None, compression: float, algorithm: str, data: st.DataObject
):
    settings = config(compression, wire_dtype=width, algorithm=algorithm)
    try:
        ranks = Planner(model, settings).starting_ranks()
    except ValueError:
        return
    for _ in range(3):
        demands = {name: data.draw(st.floats(0, 1e6)) for name in ranks if data.draw(st.booleans())}
        found = Planner(model, settings).allot(ranks, demands)
        assert found == Planner(dict(reversed(model.items())), settings).allot(ranks, demands)
        assert found.keys() == ranks.keys()
        spare = budget(model, settings) - sent_bytes(model, found, settings)
        assert spare >= -1e-6 * budget(model, settings)
        for name, rank in found.items():
            most = compressed_rank(model[name], settings)
            assert 1 <= rank <= most
            if name not in demands:
                assert rank == ranks[name]
            elif rank < min(most, max(ranks[name] + 1, ranks[name] * 4 // 3)):
                assert tensor_bytes(model[name], 1, settings) > spare
        ranks = found
