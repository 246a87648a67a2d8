"""Whether all workers do the same: compared once at the start, and every so many steps on request."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core.state import State
from powersgd_triton.layout.layout import compressed_rank

Facts = Mapping[str, Any]
SHOWN = 3
"""So many differences of a worker are listed in an error."""


class DisagreementError(RuntimeError):
    """Workers that must do the same do not. Raised on all of them."""


class Agreement:
    """Compares configuration, tensors, step and factors of all workers that take part in one model's compression.

    Args:
        state: this worker's.
        communicators: first the workers that average with each other, then groups of others, from the inside out;
            together they hold all.
    """

    def __init__(self, state: State, communicators: Sequence[Communicator]) -> None:
        self._state = state
        self._communicators = communicators
        self._device: torch.device | None = None
        self._tensors: dict[str, list[int]] = {}
        self._steps = 0

    @property
    def begun(self) -> bool:
        return self._device is not None

    def begin(self, tensors: Mapping[str, Sequence[int]], device: torch.device) -> None:
        """Compare configuration, step and {name: shape} before the first message. Collective; later calls do nothing.

        Raises:
            DisagreementError: they are not the same on all workers. Nothing was sent.
        """
        if self.begun:
            return
        self._tensors = {name: list(shape) for name, shape in tensors.items()}
        self._check(self._facts(), self._ranks(), device)
        self._device = device

    def end_step(self) -> None:
        """After a step, every ``config.check_every`` of them: compare what all workers must hold. Collective.

        Raises:
            DisagreementError: they do not.
        """
        # Counted here, since the iteration is one of the things that may differ.
        self._steps += 1
        every = self._state.config.check_every
        if every and self._steps % every == 0 and self._device is not None:
            self._check(self._facts(), {**self._ranks(), **self._bases()}, self._device)

    def _check(self, common: Facts, replicated: Facts, device: torch.device) -> None:
        """Compare facts that all workers have in common, and those of the workers that compress the same tensors."""
        if len(self._communicators) == 1:
            check_agreement({**common, **replicated}, self._communicators, device)
            return
        try:
            check_agreement(replicated, self._communicators[:1], device)
            found = None
        except DisagreementError as error:
            found = str(error)
        # So that it is raised on all workers.
        check_agreement({**common, "replicas": found}, self._communicators, device)
        if found is not None:
            raise DisagreementError(found)

    def _facts(self) -> Facts:
        config = self._state.config.to_dict()
        return {
            "iteration": self._state.iteration,
            **{f"config.{field}": value for field, value in config.items()},
            **{f"shape of {name!r}": shape for name, shape in self._tensors.items()},
        }

    def _ranks(self) -> Facts:
        """Where they do not follow from the configuration and the shapes."""
        config, plan = self._state.config, self._state.plan
        ranks = plan.ranks
        if callable(config.rank):
            ranks = {name: compressed_rank(shape, config, name) for name, shape in self._tensors.items()}
        facts: Facts = {f"rank of {name!r}": rank for name, rank in ranks.items()}
        return {**facts, **({"ranks are planned from": plan.basis} if config.planned else {})}

    def _bases(self) -> Facts:
        """Fingerprints of what comes of summed messages: the same bits on all workers."""
        found: dict[str, Any] = {}
        for bucket in self._state.buckets():
            names = [segment.name for segment in bucket.layout.segments]
            where = f"of the bucket of {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            found[f"tensors {where}"] = names
            for name, factors in (("P̂", bucket.P_hat), ("Q", bucket.basis)):
                found[f"{name} {where}"] = int(fingerprint(factors))
        return found


def check_agreement(facts: Facts, communicators: Sequence[Communicator], device: torch.device) -> None:
    """Compare facts that JSON can express. Collective; sends 40 bytes a worker unless they differ.

    Args:
        facts: {what: value}.
        communicators: groups to gather over, one after the other; together they hold all workers.
        device: where messages lie; the host waits for it.

    Raises:
        DisagreementError: they differ; says on which worker, and in what. On all workers.
    """
    text = json.dumps(facts, sort_keys=True).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.int64)
    mine = torch.cat([torch.tensor([communicators[-1].global_rank, len(text)]), digest]).to(device)
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
