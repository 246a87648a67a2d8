"""Facts that must be equal on all workers, for ``comm.agreement`` to compare."""

from collections.abc import Iterable
from typing import Any

from powersgd_triton.comm.agreement import fingerprint
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.residuals import Residuals
from powersgd_triton.core.saved_state import SavedState
from powersgd_triton.layout.matrices import Tensors, sizes
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ranks.plan import RankPlan

PROTOCOL = 4
"""Raised when other messages are sent, or computed otherwise, for the same configuration."""


def common_facts(config: PowerSGDConfig, iteration: int) -> dict[str, Any]:
    """Return facts about the package, the configuration and the step."""
    facts = {"the package's protocol": PROTOCOL, "iteration": iteration}
    return {**facts, **{f"config.{field}": value for field, value in config.to_dict().items()}}


def replicated_facts(tensors: Tensors, plan: RankPlan) -> dict[str, Any]:
    """Return shapes, their order and chosen ranks, equal on replicas. Tensor-parallel workers may have other sizes."""
    facts: dict[str, Any] = {f"shape of {name!r}": list(shape) for name, shape in tensors.items()}
    facts["tensors in order"] = [*tensors]
    config, ranks = plan.config, plan.ranks
    found = sizes(tensors, config) if callable(config.rank) or config.matrices else {}
    if callable(config.rank):
        ranks = {name: size.rank for name, size in found.items()}
    if config.matrices:
        facts |= {f"matrices of {name!r}": [size.batch, size.n, size.m] for name, size in found.items()}
    facts |= {f"rank of {name!r}": rank for name, rank in ranks.items()}
    return {**facts, **({"ranks are planned from": plan.planned_from} if config.planned else {})}


def saved_facts(saved: SavedState) -> dict[str, Any]:
    """Return what must be equal where a state is loaded. The errors are not in it, since only their mean matters."""
    facts: dict[str, Any] = {f"saved size of {name!r}": list(size) for name, size in saved.tensors.items()}
    for name, parts in saved.matrices.items():
        facts[f"saved parts of {name!r}"] = {
            key: list(part.shape) if key == "error" else int(fingerprint(part)) for key, part in parts.items()
        }
    if saved.iteration or facts:
        facts |= {"saved iteration": saved.iteration, "strict": saved.strict, "saved plan": saved.plan}
    return facts


def basis_facts(residuals: Residuals, config: PowerSGDConfig) -> dict[str, Any]:
    """Return fingerprints of the bases with which each worker writes averages in the alternating algorithm."""
    if config.algorithm != "alternating":
        return {}
    held = residuals.matrices.items()
    return {f"bases of {name!r}": [int(fingerprint(basis)) for basis in m.bases.values()] for name, m in held}


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
