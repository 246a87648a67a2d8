"""Saved states between the steps, and faults around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import checkpoint
from tests.support.faults.trainer import Trainer


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


@contextlib.contextmanager
def unchanged(trainer: Trainer) -> Iterator[None]:
    """What is refused here must leave the running state as it is."""
    before = bytes_of(trainer.state.error()), trainer.state.iter
    yield
    if (bytes_of(trainer.state.error()), trainer.state.iter) != before:
        trainer.lost.append("what was refused has changed the running state")


def bytes_of(named: dict[str, Tensor]) -> dict[str, list[int]]:
    """Tensors' bits, comparable."""
    return {name: tensor.contiguous().view(-1).view(torch.uint8).tolist() for name, tensor in named.items()}


def _refused(trainer: Trainer, path: Path, original: dict[str, Any]) -> None:
    """A file is refused, or else gives what was saved."""
    with unchanged(trainer), contextlib.suppress(ValueError):
        (tensors, rest), (saved, others) = map(checkpoint.flatten, (checkpoint.load(path), original))
        if rest != others or bytes_of(tensors) != bytes_of(saved):
            trainer.lost.append(f"a damaged file was loaded: {path.name}")
    trainer.step()


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
    with unchanged(trainer), contextlib.suppress(ValueError):
        trainer.state.load_state_dict(other)
        trainer.lost.append(f"a {kind} state was loaded")
    trainer.step()
