"""The faults, how often each was injected, and what came of it: the table in docs/faults.md."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.distributed import run_cases
from tests.support.faults import episodes, local_events, peers, saved
from tests.support.faults.episodes import KINDS, Fault, Problems
from tests.support.programs import DOCS

PAGE = DOCS / "faults.md"
"""Where the table stands."""

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
HEAD = "| fault | injected | outcome | lost | hung | poisoned |\n|---|---|---|---|---|---|"
WORKERS = 2

SKIPPED = (
    "NaN on all workers, and the step is skipped; the error of the bucket is unchanged, "
    "the other buckets keep the gradient of the step in E"
)
GOES_ON = "an ordinary step"
REFUSED = "ValueError, and the running state is unchanged"
REFUSED_BY_ALL = "ValueError on all workers, and the running states are unchanged"
TOLD = "DisagreementError on all workers, before anything is sent"
REGROUP = (
    "an exception in the other workers, whose errors keep their gradients; "
    "fewer workers, or one alone, continue from the saved state"
)

FAULTS = [
    Fault("±inf or NaN in a matrix, on one worker", SKIPPED, episodes.infinite_in_a_matrix),
    Fault("NaN in a bias, on one worker", SKIPPED, episodes.nan_in_a_bias),
    Fault("inf in the last bucket, when the others are done", SKIPPED, episodes.overflow_in_the_last_bucket),
    Fault("2 to 5 steps in a row that are not finite", SKIPPED, episodes.several_in_a_row),
    Fault("finite values whose sum over workers overflows", SKIPPED, episodes.sum_overflows, scaled=False),
    Fault(
        "a matrix of values up to 3.4e38 (standard algorithm)",
        "skipped if a product overflows, else an ordinary step; "
        "in fp32 such a value rounds away the earlier error of its element",
        episodes.product_overflows,
        scaled=False,
        algorithm="standard",
    ),
    Fault("a gradient that is zero", GOES_ON, episodes.a_layer_of_zeros, early=True),
    Fault("all gradients zero, 1 to 3 steps", GOES_ON, episodes.zeros, early=True),
    Fault("denormal gradients", GOES_ON, episodes.denormals, early=True),
    Fault("equal columns, rank one, one row, column or element", GOES_ON, episodes.dependent_columns, early=True),
    Fault("parameters that one worker does not use", GOES_ON, episodes.unused_on_one_worker, early=True),
    Fault(
        "`GradScaler` doubles, halves or sets the loss scale",
        "the error follows the scale",
        episodes.loss_scale_changes,
        scaled=True,
    ),
    Fault(
        "a loss scale at which a gradient overflows",
        "steps are skipped until the scale is low enough",
        episodes.loss_scale_overflows,
        scaled=True,
    ),
    Fault("2 to 5 micro-batches with `no_sync`", GOES_ON, episodes.accumulation, early=True),
    Fault(
        "an exception in the middle of the backward pass, on all workers",
        "the exception; nothing is applied, and gradients that were compressed stay in E. DDP needs a new wrapper",
        episodes.exception_in_backward,
    ),
    Fault("the same, with the state saved and loaded right after it", "as above", episodes.exception_then_save),
    Fault("buckets of another size in mid-run", GOES_ON, episodes.other_buckets),
    Fault("saved and loaded in mid-run", GOES_ON, saved.resumed),
    Fault("saved and loaded at another rank", GOES_ON, saved.resumed_at_another_rank),
    Fault(
        "saved, and loaded where nothing is compressed",
        "the remaining error is added to the next gradient",
        saved.resumed_uncompressed,
    ),
    Fault("a bit flipped in a saved file", REFUSED, saved.flipped_bit),
    Fault("a saved file cut off", REFUSED, saved.truncated),
    Fault("a file that is something else", REFUSED, saved.foreign_file),
    Fault("a saved state of another model or format", REFUSED, saved.foreign_state),
    Fault("a saved file that only one worker cannot read", REFUSED_BY_ALL, saved.file_refused),
    Fault(
        "workers that load different states",
        "DisagreementError on all workers, and the running states are unchanged",
        saved.different_states,
    ),
    Fault(
        "a worker that loads a state alone, while the others step or save",
        "a DisagreementError on all workers after a second; no error is lost",
        saved.loads_alone,
    ),
    Fault(
        "a rank function that fails on one worker",
        "its exception there, and one that quotes it in the other workers, before anything is sent",
        saved.rank_function,
        early=True,
    ),
    Fault(
        "no memory for a bucket on one worker",
        "its exception there, and one that quotes it in the other workers; "
        "nothing is applied, and gradients that were compressed stay in E",
        saved.no_memory,
    ),
    Fault("a worker with another configuration", TOLD, peers.other_configuration),
    Fault("a worker at another step", TOLD, peers.other_iteration),
    Fault("a worker with other tensors", TOLD, peers.other_tensors),
    *(
        Fault(f"local steps: {title}", outcome, inject, local=True)
        for title, outcome, inject in (
            ("a parameter frozen for a time", "an ordinary exchange", local_events.freezes),
            ("a parameter that is unfrozen", "it is exchanged from then on", local_events.unfreezes),
            ("buffers of new values and sizes, perhaps a NaN", "the mean of the others", local_events.averages_buffers),
            ("±inf or NaN in the parameters of one worker", "only its changes are lost", local_events.is_not_finite),
            ("an exchange that fails", "the exception; the next exchange sends what was changed", local_events.fails),
            ("other numbers of steps before `finish`", "an ordinary exchange", local_events.finishes_unevenly),
            ("saved and loaded in mid-round", "the same bits, or the mean of what all had", local_events.resumes),
            ("a wrong field in a saved state", REFUSED_BY_ALL, local_events.refuses),
        )
    ),
]
LOSSES = [
    ("a worker killed (SIGKILL) in the middle of a step, of 3 and of 2", "dies"),
    ("a worker killed (SIGKILL) in an exchange of local steps, of 3 and of 2", "dies in local steps"),
    ("a worker that stops for longer than the group's timeout, of 3 and of 2", "stops"),
]


def titles() -> list[str]:
    return [*(fault.title for fault in FAULTS), *(title for title, _ in LOSSES)]


def inject(times: int, *, rarely: int, timeout: float) -> dict[str, list[Problems]]:
    """Inject every fault so many ``times``, and those that cost new processes ``rarely``: {title: what went wrong}.

    A TimeoutError means that workers hung outside of collectives.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases({fault.title: fault for fault in FAULTS}, WORKERS, times, Path(folder), timeout=timeout)
        found = {title: _joined(by_worker) for title, by_worker in results.items()}
        for title, kind in LOSSES:
            found[title] = peers.lose(kind, rarely, Path(folder))
    return found


def _joined(by_worker: Sequence[Any]) -> list[Problems]:
    """What went wrong in each injection on any worker. One that has failed may have seen less of them."""
    seen = [found if isinstance(found, list) else [[f"lost: {found}"]] for found in by_worker]
    return [
        [f"{said} (worker {worker})" for worker, found in enumerate(injection) for said in found]
        for injection in zip(*seen, strict=False)
    ]


def markdown(found: dict[str, list[Problems]], command: str) -> str:
    """The table, and how it was made."""
    outcomes = {fault.title: fault.outcome for fault in FAULTS} | dict.fromkeys((title for title, _ in LOSSES), REGROUP)
    rows = []
    for title, injections in found.items():
        numbers = [sum(any(said.startswith(kind) for said in each) for each in injections) for kind in KINDS]
        rows.append(f"| {title} | {len(injections)} | {outcomes[title]} | {' | '.join(map(str, numbers))} |")
    version = torch.__version__.split("+")[0]
    made = f"Made by `{command}` with torch {version}, {WORKERS} gloo workers (3 where one is lost) and real DDP."
    return "\n".join([HEAD, *rows, "", made])


def listed(text: str) -> list[str]:
    """Titles of the rows between the markers of a page."""
    table = text[text.index(BEGIN) : text.index(END)]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return [row.split(" | ")[0][2:] for row in rows[1:]]


def replaced(text: str, table: str) -> str:
    """A page's text with another table between the markers.

    Raises:
        ValueError: there are no markers.
    """
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n{table}\n{text[end:]}"
