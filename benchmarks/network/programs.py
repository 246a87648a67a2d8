"""What the programs of this folder share: workers in hosts, the command line and the record of results."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import commit
from benchmarks.network.namespaces import INTERFACE, Host, can_shape, run_in_hosts

RESULTS = Path(__file__).parents[1] / "results"
PORT = 29500


def run_workers(
    program: str,
    hosts: Sequence[Host],
    workers_per_host: int,
    task: Mapping[str, Any],
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Start a program's workers with torchrun, which runs in each host, and return what ``work(task)`` returns in each.

    Args:
        program: The program's file, which calls ``main`` or ``worked``.
        hosts: Hosts.
        workers_per_host: Workers of each host.
        task: Argument of ``work``, as JSON holds it.
        timeout: Seconds until all must be done.
        environment: Variables to add to this process's.

    Raises:
        RuntimeError: A worker failed.
        TimeoutError: The workers were not done in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += [f"--nnodes={len(hosts)}", f"--nproc-per-node={workers_per_host}"]
        torchrun += [f"--master-addr={hosts[0].address}", f"--master-port={PORT}"]
        work = [str(Path(program).resolve()), "--work", json.dumps(task), "--out", folder]
        # With the address, torchrun does not look up the machine's name, which no server answers in a namespace.
        commands = [
            [*torchrun, f"--node-rank={node}", f"--local-addr={host.address}", *work] for node, host in enumerate(hosts)
        ]
        run_in_hosts(
            hosts, commands, timeout, {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", **(environment or {})}
        )
        workers = len(hosts) * workers_per_host
        return [json.loads((Path(folder) / f"{worker}.json").read_text()) for worker in range(workers)]


def main(
    description: str,
    name: str,
    steps: int,
    work: Callable[[Mapping[str, Any]], Any],
    measure: Callable[[int], Sequence[Any]],
    table: Callable[[Sequence[Any]], str],
    packages: Sequence[str],
) -> None:
    """Run a program: print a table of its rows and record them, or do the work of a worker.

    Args:
        description: Text of ``--help``.
        name: Name of the record in benchmarks/results, without suffix.
        steps: Default of ``--steps``.
        work: What a worker does, given the task. Returns values that JSON holds.
        measure: Returns the rows (dataclasses), given the number of steps.
        table: Returns Markdown, given the rows.
        packages: Packages whose versions are recorded.
    """
    if worked(work):
        return
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help=f"steps to count (default: {steps})")
    arguments = parser.parse_args()
    prepare()
    rows = measure(arguments.steps)
    print(table(rows))
    record = {
        **environment(packages),
        "steps": arguments.steps,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def worked(work: Callable[[Mapping[str, Any]], Any]) -> bool:
    """Do the work of a worker if ``run_workers`` started this process. Return whether it did."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--work", type=json.loads)
    parser.add_argument("--out", type=Path)
    arguments, _ = parser.parse_known_args()
    if arguments.work is None:
        return False
    (arguments.out / f"{os.environ['RANK']}.json").write_text(json.dumps(work(arguments.work)))
    return True


def prepare() -> None:
    """Exit with the reason if this process cannot limit links. Otherwise remove namespaces also when it is ended."""
    if reason := can_shape():
        raise SystemExit(reason)
    # `kill` and `timeout` would otherwise leave the namespaces.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """Return what a record says of the machine and of the versions of packages."""
    return {
        **{package: importlib.metadata.version(package) for package in packages},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "commit": commit(),
    }
