"""Workers tell each other what they do, with which facts, and whether it failed."""

import collections
import contextlib
import hashlib
import json
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.control import DisagreementError
from powersgd_triton.config import logger

T = TypeVar("T")
Facts = Mapping[str, Any]
SHOWN, LONGEST = 3, 2000
"""Differences that an error lists for each worker, and characters of an exception that other workers are told."""
WAITING, UNDER_WAY = "a step that waits for the others", "an exchange that is under way"
"""Calls of workers that have started other collectives, which others may not start if they do something else."""
CALL, FAILED = "call", "failed"
"""Facts about what a worker is doing, and about its exception: [whether it is a ValueError, its text]."""
COMPUTED_BY = "computed by"
"""The fact that may differ. All workers then log a warning."""
DIFFERENT_BITS = "workers compute in different ways, so that their averages differ by about 1e-7 in each step"


def together(
    call: str, act: Callable[[], tuple[T, Facts, Facts]], communicator: Communicator, device: torch.device | None = None
) -> T:
    """Run code that may fail on one worker only, and compare facts. Unless all agree, all raise an error. Collective.

    Use it before a collective, in which the others would wait for a worker that raised an exception. It sends 40 bytes
    a worker if all agree, and returns the result of ``act``.

    Args:
        call: What is done. Workers that do different things at the same time disagree.
        act: Returns (result, common, replicated). Both are facts {name: value} that JSON can express. Common facts must
            be equal on all workers, replicated ones on those of the communicator's group, which compress the same
            tensors. ``COMPUTED_BY`` may differ.
        communicator: Collectives of the workers that average with each other, with the ``others``.
        device: Device of the gradients, if it is known. See ``Communicator.gather``.

    Raises:
        Exception: What ``act`` raised on this worker.
        ValueError: ``act`` raised a ValueError on other workers. The message names them and their reasons.
        DisagreementError: ``act`` raised another exception on other workers, or facts differ.
        RuntimeError: The other workers could not be reached, for example because they did not call this function.
    """
    comparison = compare(call, act, communicator, device)
    next(comparison)
    return exhaust(comparison)


def compare(
    call: str, act: Callable[[], tuple[T, Facts, Facts]], communicator: Communicator, device: torch.device | None = None
) -> Generator[T | None, None, T]:
    """Do what ``together`` does in two parts, so that a worker need not wait for the others in between.

    The first part ends with a yield of the result of ``act``, or of None if that raised an exception.
    """
    result: T | None = None
    own: Exception | None = None
    difference: Exception | None = None
    facts: list[Facts] = [{}, {}]
    failed = None
    try:
        result, *facts = act()
        json.dumps(facts)
    except Exception as error:
        result, own, facts = None, error, [{}, {}]
        failed = [isinstance(error, ValueError), f"{type(error).__name__}: {error}"[:LONGEST]]
    try:
        common, replicated = ({CALL: call, FAILED: failed, **found} for found in facts)
        try:
            _announce(call, communicator, device)
            comparison = _compared(common, replicated, communicator, device)
            next(comparison)
            yield result
            difference = exhaust(comparison)
        except RuntimeError as error:
            lost = f"{call} is collective, but this worker could not reach all others; do all workers take part?"
            raise own or RuntimeError(f"{lost} ({error})") from error
        own = own or difference
        if own is not None:
            raise own
        return cast(T, result)
    finally:
        # An exception that is kept in its own traceback would keep everything else in it alive.
        del own, difference


def exhaust(run: Generator[Any, None, T]) -> T:
    """Run a generator to its end. Return what it returns."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return cast(T, end.value)


def found(call: str, find: Callable[[], T]) -> T:
    """Return what tells a call its workers. If that raises an exception, tell all workers of the default group."""
    with contextlib.suppress(Exception):
        return find()
    return together(call, lambda: (find(), {}, {}), Communicator())


def _announce(call: str, communicator: Communicator, device: torch.device | None) -> None:
    """Let workers that wait in a step for this one take part in the call, so that all hear of the mistake."""
    reference = weakref.ref(communicator)

    def answer() -> None:
        known = reference()
        if known is not None:
            together(WAITING, lambda: (None, {}, {}), known, device)

    for each in (communicator, *communicator.others):
        if each.control is not None:
            each.control.call(call, answer)


def _compared(
    common: Facts, replicated: Facts, communicator: Communicator, device: torch.device | None
) -> Generator[None, None, Exception | None]:
    """Return an error if facts differ. Yield after each message has left."""
    if not communicator.others:
        return (yield from _difference({**common, **replicated}, [communicator], device))
    inside = yield from _difference(replicated, [communicator], device)
    # The other groups must learn of a difference too, so that all workers raise an error.
    common = {**common, "replicas": None if inside is None else str(inside)}
    difference = yield from _difference(common, [communicator, *communicator.others], device)
    return difference or inside


def _collected(
    facts: Facts, communicators: Sequence[Communicator], device: torch.device | None
) -> Generator[None, None, dict[int, bytes]]:
    """Return the facts of all workers as JSON, {worker: text}. Empty if they are equal."""
    text = json.dumps(facts, sort_keys=True).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()[:24]), dtype=torch.int64)
    mine = torch.cat([torch.tensor([communicators[-1].global_index, len(text)], device="cpu"), digest])
    table = yield from _gathered(mine, communicators, device)
    if bool((table[:, 1:] == table[0, 1:]).all()):
        return {}
    padded = torch.zeros(int(table[:, 1].max()), dtype=torch.uint8, device="cpu")
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = yield from _gathered(padded, communicators, device)
    rows = sorted(zip(table[:, :2].tolist(), texts, strict=True), key=lambda pair: pair[0])
    return {worker: bytes(row[:length].tolist()) for (worker, length), row in rows}


def _gathered(
    mine: Tensor, communicators: Sequence[Communicator], device: torch.device | None
) -> Generator[None, None, Tensor]:
    """Return the tensors of all workers, [workers, …]. Their order may differ between the groups of workers."""
    table = mine.unsqueeze(0)
    for communicator in communicators:
        gathered = communicator.start_gather(table, device)
        yield
        table = gathered().flatten(0, 1)
    return table


def _difference(
    own: Facts, communicators: Sequence[Communicator], device: torch.device | None
) -> Generator[None, None, Exception | None]:
    """Return an error that names the workers that failed, or those that differ from the majority, and in what."""
    collected = yield from _collected(own, communicators, device)
    found = {worker: json.loads(text) for worker, text in collected.items()}
    doing = {facts[CALL] for facts in found.values()}
    for each in communicators:
        if each.control is not None:
            # All that have an exchange under way have started the same.
            each.control.broken |= WAITING in doing or (UNDER_WAY in doing and len(doing) > 1)
    kinds: dict[str, list[str]] = {}
    for worker, facts in found.items():
        if COMPUTED_BY in facts:
            kinds.setdefault(facts.pop(COMPUTED_BY), []).append(str(worker))
    if len(kinds) > 1:
        listed = [f"{kind} on workers {', '.join(workers)}" for kind, workers in kinds.items()]
        logger.warning("%s: %s", DIFFERENT_BITS, "; ".join(listed))
    texts = {worker: json.dumps(facts, sort_keys=True) for worker, facts in found.items()}
    if len({*texts.values()}) < 2:
        return None
    failures = {worker: facts[FAILED] for worker, facts in found.items() if facts[FAILED]}
    if failures:
        said = "; ".join(f"{found[each][CALL]} failed on worker {each}: {why}" for each, (_, why) in failures.items())
        return ValueError(said) if all(refused for refused, _ in failures.values()) else DisagreementError(said)
    ((usual, _),) = collections.Counter(texts.values()).most_common(1)
    model, expected = next((worker, found[worker]) for worker, text in texts.items() if text == usual)
    lines = []
    for worker, facts in found.items():
        keys = sorted(key for key in {*facts, *expected} if facts.get(key, "none") != expected.get(key, "none"))
        if CALL in keys:
            # What comes at different times cannot be compared.
            calls = f"worker {worker} is in {facts[CALL]} and worker {model} in {expected[CALL]}"
            lines.append(f"{calls}: all workers must call it")
        elif keys:
            listed = [f"{key}: {facts.get(key, 'none')} instead of {expected.get(key, 'none')}" for key in keys[:SHOWN]]
            more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
            lines.append(f"worker {worker} differs from worker {model} in {'; '.join(listed)}{more}")
    return DisagreementError("workers do not agree: " + "\n".join(lines))


def fingerprint(tensor: Tensor) -> Tensor:
    """Return an int64 scalar that depends on all bytes of a tensor and on their order."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in tensor.contiguous().view(-1).view(torch.uint8).split(1 << 24):
        place = torch.arange(block.numel(), dtype=torch.int64, device=block.device)
        total = total * 31 + ((block.long() + 1) * ((place * 0x9E3779B1 + 0x7F4A7C15) & 0x7FFFFFFF)).sum()
    return total & (2**62 - 1)
