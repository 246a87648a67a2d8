"""Facts that must be equal on all workers, for ``comm.agreement`` to compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from powersgd_triton.comm.agreement import fingerprint
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import compressed_rank
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ranks.plan import RankPlan

Tensors = Mapping[str, Sequence[int]]
"""{name: shape}."""


def common_facts(config: PowerSGDConfig, tensors: Tensors, iteration: int) -> dict[str, Any]:
    """Return facts about the configuration, the tensors and the step."""
    return {
        "iteration": iteration,
        **{f"config.{field}": value for field, value in config.to_dict().items()},
        **{f"shape of {name!r}": list(shape) for name, shape in tensors.items()},
    }


def rank_facts(config: PowerSGDConfig, tensors: Tensors, plan: RankPlan) -> dict[str, Any]:
    """Return facts about the ranks, if they do not follow from the configuration and the shapes."""
    ranks = plan.ranks
    if callable(config.rank):
        ranks = {name: compressed_rank(shape, config, name) for name, shape in tensors.items()}
    facts: dict[str, Any] = {f"rank of {name!r}": rank for name, rank in ranks.items()}
    return {**facts, **({"ranks are planned from": plan.planned_from} if config.planned else {})}


def factor_facts(buckets: Iterable[Bucket]) -> dict[str, Any]:
    """Return fingerprints of the factors that are computed from sums. Their bits are equal on all workers."""
    found: dict[str, Any] = {}
    for bucket in buckets:
        names = [segment.name for segment in bucket.layout.segments]
        where = f"of the bucket of {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        found[f"tensors {where}"] = names
        for name, factors in (("P̂", bucket.P_hat), ("Q", bucket.basis)):
            found[f"{name} {where}"] = int(fingerprint(factors))
    return found
