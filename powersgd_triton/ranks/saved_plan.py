"""The saved form of a plan of ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from powersgd_triton.config import AUTO, PowerSGDConfig

Plan = dict[str, dict[str, Any]]
"""{"ranks": {name: rank}, "demands": {name: number}, "spectra", "pending": {name: [energy, energy of each column]}}."""

CHOICES = ({"max_rank"}, {"compression"}, {"compression", "wire_dtype"})
"""The fields that are settled together."""


def is_count(value: Any, least: int = 0) -> bool:
    """Return whether this is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def checked_plan(plan: Any) -> Plan:
    """Check a saved plan of ranks and copy it. A value that is not a plan raises ValueError."""
    parts: dict[str, Callable[[Any], bool]] = {
        "ranks": functools.partial(is_count, least=1),
        "demands": _is_demand,
        "spectra": _is_spectrum,
        "pending": _is_spectrum,
    }
    fits = isinstance(plan, Mapping) and all(isinstance(part, Mapping) for part in plan.values())
    if fits and plan:
        # What was chosen from measured times. Most states have none.
        settled = plan.get("settled")
        fits = (not settled or _is_choice(settled)) and plan.keys() - {"settled"} == parts.keys()
        fits = fits and all(isinstance(n, str) and fit(v) for key, fit in parts.items() for n, v in plan[key].items())
    if not fits:
        raise ValueError(f"expected a plan of ranks with {', '.join(parts)}; got {str(plan)[:80]}")
    return {key: dict(part) for key, part in plan.items()}


def _is_choice(settled: Mapping[str, Any]) -> bool:
    """Return whether these are fields that a configuration with a budget can have."""
    if settled.keys() not in CHOICES:
        return False
    if None in settled.values():
        return settled == {"compression": None}
    try:
        PowerSGDConfig(**{"compression": 1, **settled})
    except (TypeError, ValueError):
        return False
    return settled.get("compression") != AUTO


def _is_demand(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0


def _is_spectrum(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 1 and all(map(_is_demand, value))
