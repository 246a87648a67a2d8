"""Parameters of DeepSpeed as differences: what is compared inside a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powersgd_triton.layout.wire_format import BLOCK, DIFFERENCES
from powersgd_triton.ops.differences import apply_reference, encode_reference
from tests.support.deepspeed_training import Case, StubScaler, engine_for
from tests.support.programs import output_of
from tests.support.sharded_training import Net


class Tied(Net):
    """Its head shares the embedding's weights, its first block is frozen, and the optimizer has two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight
        self.blocks[0].requires_grad_(False)

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups: matrices, and vectors without weight decay."""
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


@contextlib.contextmanager
def prepared(case: Case, section: Mapping[str, Any] | None, model: nn.Module | None = None) -> Iterator[Any]:
    """An engine whose loss scale halves when a gradient overflows, as with fp16."""
    with engine_for(case, section, model) as engine:
        if case.stage and not case.fp16 and hasattr(engine.optimizer, "loss_scaler"):
            engine.optimizer.loss_scaler = StubScaler()
        yield engine


def copies(engine: Any) -> list[Tensor]:
    """v of each parameter group, [workers, elements of a partition]."""
    return [group.rows.clone() for group in engine.powersgd.parameters._groups()]


def masters(engine: Any) -> list[Tensor]:
    """w of each parameter group, of all workers, [workers, elements of a partition]."""
    found = []
    for own in [group.masters for group in engine.powersgd.parameters._groups()]:
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own.clone())
        found.append(torch.stack(gathered))
    return found


def state_of(engine: Any) -> list[Tensor]:
    return masters(engine) + copies(engine)


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """To the bit."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def rounded(engine: Any) -> list[Tensor]:
    """w of each parameter group, in the dtype of v."""
    return [w.to(v.dtype) for w, v in zip(masters(engine), copies(engine), strict=True)]


def modelled(
    before: Sequence[Tensor], wanted: Sequence[Tensor], width: str, slices: int, used: Sequence[int]
) -> list[Tensor]:
    """What the copies, as they were ``before`` a step, must be after it: a plain model of it.

    A message has at most ``slices`` elements of all workers. ``used`` are each group's elements that belong to
    parameters, the first ones.
    """
    form, expected = DIFFERENCES[width], [copy.clone() for copy in before]
    for copy, targets in zip(expected, wanted, strict=True):
        each = max(BLOCK, slices // len(copy) // BLOCK * BLOCK)
        for rows, wished in zip(copy.split(each, dim=1), targets.split(each, dim=1), strict=True):
            content = torch.zeros(len(rows), form.difference_bytes(rows.shape[1])[1], dtype=torch.uint8)
            for row, target, out in zip(rows, wished, content, strict=True):
                encode_reference(target, row, form, out)
            apply_reference(content, form, rows)
    for copy, numel in zip(expected, used, strict=True):
        copy.view(-1)[numel:] = 0
    return expected


def convert(saved: Path, universal: Path) -> Path:
    """A checkpoint's universal form, which any number of workers loads. Without the compression's state."""
    arguments: list[str | Path] = ["--input_folder", saved, "--output_folder", universal, "--inject_missing_state"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    output_of("-m", "deepspeed.checkpoint.ds_to_universal", *arguments, *workers, DS_ACCELERATOR="cpu")
    return universal
