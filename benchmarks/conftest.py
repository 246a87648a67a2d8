"""One process group for all benchmarks, and the table of ratios at the end."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="NAME", help="write the results to benchmarks/results/NAME.json")


@pytest.fixture(scope="session", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """World size 1, as hooks need some group."""
    store = tmp_path_factory.mktemp("store") / "init"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows = [row for bench in (session.benchmarks if session else []) if (row := _row(bench))]
    if not rows:
        return
    write = terminalreporter.write_line
    write("")
    write("One hook step; ratios to torch's faster variant and to a copy of the gradients, within this run")
    write(
        f"{'gradients':<16}{'rank':>5}  {'provider':<15}{'median ms':>10}{'IQR ms':>8}{'vs torch':>10}{'copies':>8}"
        f"{'persistent':>12}{'peak':>8}  (memory in gradients' bytes)"
    )
    for row in rows:
        same = [other for other in rows if (other["gradients"], other["rank"]) == (row["gradients"], row["rank"])]
        torch_ms = min((o["median_ms"] for o in same if o["provider"].startswith("torch")), default=float("nan"))
        copy_ms = min((o["median_ms"] for o in same if o["provider"] == "copy"), default=float("nan"))
        row["speedup_over_torch"], row["copies"] = torch_ms / row["median_ms"], row["median_ms"] / copy_ms
        write(
            f"{row['gradients']:<16}{row['rank']:>5}  {row['provider']:<15}"
            f"{row['median_ms']:>10.1f}{row['iqr_ms']:>8.1f}{row['speedup_over_torch']:>9.2f}×{row['copies']:>8.2f}{row['persistent']:>12.2f}{row['peak']:>8.2f}"
        )
    name = config.getoption("--record")
    if name:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps({"machine": _machine(), "rows": rows}, indent=1) + "\n")
        write(f"written to benchmarks/results/{name}.json")


def _row(bench: Any) -> dict[str, Any] | None:
    if bench.stats is None or "provider" not in bench.extra_info:
        return None
    return {**bench.extra_info, "median_ms": bench.stats.median * 1e3, "iqr_ms": bench.stats.iqr * 1e3}


def _machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent).stdout
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1] for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": cpu.strip(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.strip(),
    }
