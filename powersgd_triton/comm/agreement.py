"""Whether all workers do the same."""

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
"""So many differences of a worker are listed in an error."""


class DisagreementError(RuntimeError):
    """Workers that must do the same do not. Raised on all of them."""


def compare(common: Facts, replicated: Facts, communicator: Communicator, device: torch.device) -> None:
    """Compare facts of all workers that compress one model. Collective; sends 40 bytes a worker unless they differ.

    Args:
        common: {what: value} that all workers must have in common. JSON can express the values.
        replicated: the same, of the workers of the communicator's group only, which compress the same tensors.
        communicator: the workers that average with each other, and its ``others``.
        device: where messages lie; the host waits for it.

    Raises:
        DisagreementError: they differ; says on which worker, and in what. On all workers.
    """
    if not communicator.others:
        _check({**common, **replicated}, [communicator], device)
        return
    try:
        _check(replicated, [communicator], device)
        found = None
    except DisagreementError as error:
        found = str(error)
    # The other groups must hear of it too, so that all workers raise.
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
    """[workers, …]: all workers' tensors, in an order that is the same on all of them but for ties of groups."""
    table = mine.unsqueeze(0)
    for communicator in communicators:
        table = communicator.gather(table).flatten(0, 1)
    return table


def _difference(found: Mapping[int, Facts]) -> str:
    """Which workers differ from what most have, and in what."""
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
    """int64 scalar of a tensor's bits, in which each byte's place counts."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in tensor.contiguous().view(-1).view(torch.uint8).split(1 << 24):
        place = torch.arange(block.numel(), dtype=torch.int64, device=block.device)
        total = total * 31 + ((block.long() + 1) * ((place * 0x9E3779B1 + 0x7F4A7C15) & 0x7FFFFFFF)).sum()
    return total & (2**62 - 1)
