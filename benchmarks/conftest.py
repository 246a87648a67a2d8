"""One process group for all benchmarks, and the tables at the end."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.cases import (
    difference_cases,
    kernel_cases,
    launch_cases,
    orthogonalize_cases,
    replay_cases,
    step_cases,
    wire_cases,
)
from benchmarks.environment import choose_interpreter, describe_cpu, describe_gpu, device_under_test
from benchmarks.environment import process_group as one_worker
from benchmarks.report import tables, write_report
from benchmarks.results_file import RESULTS, Results, Row, record
from benchmarks.timing import Clock

STARTED = time.monotonic()
RESULTS_KEY = pytest.StashKey[Results]()
CPU_ROWS_KEY = pytest.StashKey[list[Row]]()
SHARES = {
    "test_gpu_hook_step": 0.6,
    "test_gpu_kernels": 0.85,
    "test_gpu_launches": 0.92,
    "test_gpu_options": 1.0,
    "test_gpu_overlap": 1.0,
}
"""By which share of the budget a module's benchmarks are to end."""

CASES = {
    "step_case": step_cases,
    "orthogonalize_case": orthogonalize_cases,
    "kernel_case": kernel_cases,
    "wire_case": wire_cases,
    "difference_case": difference_cases,
    "launch_case": launch_cases,
    "replay_case": replay_cases,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="NAME", help="write the results to benchmarks/results/NAME.json and $OUT")
    group = parser.getgroup("GPU benchmarks (-m gpu)")
    group.addoption("--full", action="store_true", help="all ranks, dtypes and providers")
    group.addoption("--dry", action="store_true", help="a tiny gradient set, in Triton's interpreter without a GPU")
    group.addoption("--budget", type=float, default=450, metavar="SECONDS", help="then skip what is left")
    group.addoption("--tests", default="not run", metavar="RESULT", help="what became of pytest tests -m gpu")


def pytest_configure(config: pytest.Config) -> None:
    dry = config.getoption("--dry")
    config.stash[RESULTS_KEY] = Results(config.getoption("--record"), dry)
    config.stash[CPU_ROWS_KEY] = []
    if dry:
        choose_interpreter()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    options = metafunc.config.option
    for argument, cases in CASES.items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, cases(options.full, options.dry), ids=lambda case: case.id)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or config.getoption("--dry"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; --dry runs a tiny case without one"))


@pytest.fixture(scope="session", autouse=True)
def process_group() -> Iterator[str]:
    """World size 1, as hooks need some group."""
    with one_worker() as backend:
        yield backend


@pytest.fixture(scope="session")
def clock() -> Clock:
    return Clock(device_under_test())


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config, clock: Clock, process_group: str) -> Results:
    """Where GPU benchmarks put their rows."""
    found = pytestconfig.stash[RESULTS_KEY]
    found.machine = {
        **describe_gpu(clock.device),
        "group": process_group,
        "tests": pytestconfig.getoption("--tests"),
        "dry": pytestconfig.getoption("--dry"),
        "copy_gbps": clock.copy_bandwidth,
    }
    return found


@pytest.fixture(scope="session")
def cpu_rows(pytestconfig: pytest.Config) -> list[Row]:
    """Where the CPU's benchmark puts its rows."""
    return pytestconfig.stash[CPU_ROWS_KEY]


@pytest.fixture(autouse=True)
def within_budget(request: pytest.FixtureRequest) -> None:
    """Skip a module's GPU benchmarks once its share of the time is used up, so that the next ones get theirs."""
    share = SHARES.get(request.module.__name__.rpartition(".")[2])
    if share is not None and time.monotonic() - STARTED > share * request.config.getoption("--budget"):
        pytest.skip("the time is used up (--budget)")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    write = terminalreporter.write_line
    results = config.stash[RESULTS_KEY]
    if results.rows:
        write("")
        write(tables(results.machine, results.rows))
        for path in write_report(results):
            write(f"written to {path}")
    rows = config.stash[CPU_ROWS_KEY]
    if not rows:
        return
    write("")
    write("One hook step, providers by turns; ratios to torch's faster variant and to a copy of the gradients")
    write(", ".join(f"{key} {value}" for key, value in describe_cpu().items()))
    write(
        f"{'gradients':<16}{'threads':>8}{'rank':>5}  {'provider':<15}{'median ms':>10}{'IQR ms':>8}{'vs torch':>10}"
        f"{'copies':>8}{'persistent':>12}{'peak':>8}  (memory in gradients' bytes)"
    )
    for row in rows:
        same = [other for other in rows if all(other[key] == row[key] for key in ("gradients", "rank", "threads"))]
        torch_ms = min((o["median_ms"] for o in same if o["provider"].startswith("torch")), default=float("nan"))
        copy_ms = min((o["median_ms"] for o in same if o["provider"] == "copy"), default=float("nan"))
        row["speedup_over_torch"], row["copies"] = torch_ms / row["median_ms"], row["median_ms"] / copy_ms
        write(
            f"{row['gradients']:<16}{row['threads']:>8}{row['rank']:>5}  {row['provider']:<15}"
            f"{row['median_ms']:>10.1f}{row['iqr_ms']:>8.1f}{row['speedup_over_torch']:>9.2f}×{row['copies']:>8.2f}"
            f"{row['persistent']:>12.2f}{row['peak']:>8.2f}"
        )
    name = config.getoption("--record")
    if name:
        write(f"written to {record(RESULTS / f'{name}.json', describe_cpu(), rows)}")
