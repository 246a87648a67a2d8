"""Tests that share processes: all of a file with the same number of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.support.deepspeed_training import prepare


@dataclasses.dataclass(frozen=True)
class Job:
    """A function with assertions, which all workers call; ``slow`` as pytest's mark, ``engine`` for DeepSpeed."""

    body: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    workers: int = 2
    slow: bool = False
    engine: bool = True
    name: str = ""

    @property
    def __name__(self) -> str:
        return self.body.__name__

    def __str__(self) -> str:
        if self.name:
            return self.name
        words = [getattr(argument, "__name__", str(argument)) for argument in (self.body, *self.arguments)]
        return "-".join([*words, f"{self.workers} workers"])

    def kind(self) -> tuple[int, bool, bool]:
        """Jobs of one kind run in the same processes."""
        return self.workers, self.slow, self.engine

    def __call__(self, worker: int, world_size: int) -> Any:
        if self.engine:
            prepare(worker, world_size)
        return self.body(*self.arguments)


def each(body: Callable[..., None], *arguments: Any, workers: int = 2, slow: bool = False) -> list[Job]:
    """A job for each argument; those of a tuple go together."""
    return [Job(body, one if isinstance(one, tuple) else (one,), workers, slow) for one in arguments]


def named(cases: Mapping[str, Callable[[], None]], workers: int, *, slow: bool = False, engine: bool) -> list[Job]:
    return [Job(body, (), workers, slow, engine, name) for name, body in cases.items()]


def parametrized(jobs: list[Job]) -> pytest.MarkDecorator:
    marks = {True: [pytest.mark.slow], False: []}
    return pytest.mark.parametrize("job", [pytest.param(job, id=str(job), marks=marks[job.slow]) for job in jobs])
