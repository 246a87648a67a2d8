"""Faults around saved states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import checkpoint
from tests.support.faults.trainer import Trainer

# Saved states ---------------------------------------------------------------------------------------------------------


def resume(trainer: Trainer, folder: Path, **fields: Any) -> None:
    """Save through a file, and go on with a new state."""
    trainer.audit()
    saved, path = trainer.state.state_dict(), folder / f"saved.{trainer.dice.choice(('pt', 'safetensors'))}"
    if trainer.worker == 0:
        checkpoint.save(saved, path)
    dist.barrier()
    trainer.state = trainer.new_state(**fields)
    trainer.state.load_state_dict(checkpoint.load(path))
    dist.barrier()
    trainer.ledger.load(trainer.state.config, trainer.workers)


def resumed(trainer: Trainer, folder: Path) -> None:
    resume(trainer, folder)
    trainer.step()


def resumed_at_another_rank(trainer: Trainer, folder: Path) -> None:
    ranks = [rank for rank in (1, 2, 3, 5) if rank != trainer.setting.rank]
    resume(trainer, folder, matrix_approximation_rank=trainer.dice.choice(ranks))
    trainer.step()


def resumed_uncompressed(trainer: Trainer, folder: Path) -> None:
    resume(trainer, folder, min_compression_rate=1e9)
    trainer.step()


def _refused(trainer: Trainer, path: Path, original: dict[str, Any]) -> None:
    """Whether a file is refused, or else gives what was saved, and the running state stays as it is."""
    before = bytes_of(trainer.state.error())
    try:
        loaded = checkpoint.load(path)
    except ValueError:
        loaded = original
    if checkpoint.flatten(loaded)[1] != checkpoint.flatten(original)[1] or bytes_of_state(loaded) != bytes_of_state(
        original
    ):
        trainer.lost.append(f"a damaged file was loaded: {path.name}")
    if bytes_of(trainer.state.error()) != before:
        trainer.lost.append("a refused file has changed the running state")
    trainer.step()


def bytes_of(named: dict[str, Tensor]) -> dict[str, list[int]]:
    """Tensors' bits, comparable."""
    return {name: tensor.contiguous().view(-1).view(torch.uint8).tolist() for name, tensor in named.items()}


def bytes_of_state(state: dict[str, Any]) -> dict[str, list[int]]:
    return bytes_of(checkpoint.flatten(state)[0])


def _damage(trainer: Trainer, folder: Path, damage: Callable[[bytes], bytes]) -> None:
    trainer.audit()
    saved = trainer.state.state_dict()
    path = folder / f"damaged-{trainer.worker}.{trainer.dice.choice(('pt', 'safetensors'))}"
    checkpoint.save(saved, path)
    path.write_bytes(damage(path.read_bytes()))
    _refused(trainer, path, saved)


def flipped_bit(trainer: Trainer, folder: Path) -> None:
    def damage(content: bytes) -> bytes:
        place = trainer.dice.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1 << trainer.dice.randrange(8)]) + content[place + 1 :]

    _damage(trainer, folder, damage)


def truncated(trainer: Trainer, folder: Path) -> None:
    _damage(trainer, folder, lambda content: content[: trainer.dice.randrange(len(content))])


def foreign_file(trainer: Trainer, folder: Path) -> None:
    kind = trainer.dice.choice(("text", "model"))
    path = folder / f"foreign-{trainer.worker}.pt"
    if kind == "text":
        path.write_text("not a checkpoint")
    else:
        torch.save({"model": dict(trainer.model.named_parameters())}, path)
    _refused(trainer, path, trainer.state.state_dict())


def foreign_state(trainer: Trainer, folder: Path) -> None:
    """A sound file, of another model."""
    trainer.audit()
    saved = trainer.state.state_dict()
    kind = trainer.dice.choice(("renamed", "reshaped", "format"))
    matrices = dict(saved["matrices"])
    name = trainer.dice.choice(sorted(matrices))
    other: dict[str, Any] = {**saved, "matrices": matrices}
    if kind == "renamed":
        matrices["other"] = matrices.pop(name)
    elif kind == "reshaped":
        matrices[name] = {part: torch.zeros(3, 3) for part in matrices[name]}
    else:
        other["format_version"] = 999
    before = bytes_of(trainer.state.error())
    try:
        trainer.state.load_state_dict(other)
    except ValueError:
        pass
    else:
        trainer.lost.append(f"a {kind} state was loaded")
    if bytes_of(trainer.state.error()) != before:
        trainer.lost.append("a refused state has changed the running one")
    trainer.step()
