"""Checks that all workers agree on configuration, tensors, step and factors."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator

Facts = Mapping[str, Any]
SHOWN = 3
"""Number of differences that an error lists for each worker."""


class DisagreementError(RuntimeError):
    """Workers differ in something that must be equal. It is raised on all workers."""


def compare(common: Facts, replicated: Facts, communicator: Communicator, device: torch.device) -> None:
    """Compare facts of all workers that compress one model. Collective. Sends 40 bytes a worker if all agree.

    Args:
        common: {fact: value} that must be equal on all workers. JSON must be able to express the values.
        replicated: {fact: value} that must be equal on the workers of the communicator's group only. These workers
            compress the same tensors.
        communicator: Collectives of the workers that average with each other, with the ``others``.
        device: Device of the messages. The host waits for it.

    Raises:
        DisagreementError: Facts differ. The message names the workers and the facts. Raised on all workers.
    """
    if not communicator.others:
        _check({**common, **replicated}, [communicator], device)
        return
    try:
        _check(replicated, [communicator], device)
        found = None
    except DisagreementError as error:
        found = str(error)
    # The other groups must learn of a difference too, so that all workers raise an error.
    _check({**common, "replicas": found}, [communicator, *communicator.others], device)
    if found is not None:
        raise DisagreementError(found)


def _check(facts: Facts, communicators: Sequence[Communicator], device: torch.device) -> None:
    text = json.dumps(facts, sort_keys=True).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.int64)
    mine = torch.cat([torch.tensor([communicators[-1].global_index, len(text)]), digest]).to(device)
    table = _gathered(mine, communicators).cpu()
    if bool((table[:, 1:] == table[0, 1:]).all()):
        return
    padded = torch.zeros(int(table[:, 1].max()), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = _gathered(padded.to(device), communicators).cpu()
    found = {
        worker: json.loads(bytes(row[:length].tolist()))
        for (worker, length), row in zip(table[:, :2].tolist(), texts, strict=True)
    }
    raise DisagreementError(_difference(found))


def _gathered(mine: Tensor, communicators: Sequence[Communicator]) -> Tensor:
    """Return the tensors of all workers, [workers, …]. Their order may differ between the groups of workers."""
    table = mine.unsqueeze(0)
    for communicator in communicators:
        table = communicator.gather(table).flatten(0, 1)
    return table


def _difference(found: Mapping[int, Facts]) -> str:
    """Return a message that names the workers that differ from the majority, and the facts that differ."""
    wordings = {worker: json.dumps(facts, sort_keys=True) for worker, facts in sorted(found.items())}
    usual = collections.Counter(wordings.values()).most_common(1)[0][0]
    model = next(worker for worker, wording in wordings.items() if wording == usual)
    expected = found[model]
    lines = []
    for worker, facts in sorted(found.items()):
        keys = sorted(key for key in {*facts, *expected} if facts.get(key, "none") != expected.get(key, "none"))
        if keys:
            listed = [f"{key}: {facts.get(key, 'none')} instead of {expected.get(key, 'none')}" for key in keys[:SHOWN]]
            more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
            lines.append(f"worker {worker} differs from worker {model} in {'; '.join(listed)}{more}")
    return "workers do not agree: " + "\n".join(lines)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return an int64 scalar that depends on all bytes of a tensor and on their order."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in tensor.contiguous().view(-1).view(torch.uint8).split(1 << 24):
        place = torch.arange(block.numel(), dtype=torch.int64, device=block.device)
        total = total * 31 + ((block.long() + 1) * ((place * 0x9E3779B1 + 0x7F4A7C15) & 0x7FFFFFFF)).sum()
    return total & (2**62 - 1)
