"""Show that two commits train alike, bit for bit, and that one loads what the other saved.

It uses the public interface alone, so that the same file runs with either commit on PYTHONPATH:

    PYTHONPATH=OLD python tests/support/trajectories.py run --out old.json
    PYTHONPATH=NEW python tests/support/trajectories.py run --out new.json
    python tests/support/trajectories.py compare old.json new.json

    PYTHONPATH=OLD python tests/support/trajectories.py save FOLDER
    PYTHONPATH=OLD python tests/support/trajectories.py load FOLDER --out old.json      # and NEW, then compare
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import hashlib
import io
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

# The files beside this one; `tests` would be that of the commit on PYTHONPATH.
from trajectory_cases import Case, cases, files, quick  # type: ignore[import-not-found]
from trajectory_models import RESUMED_STEP, STEPS, Ddp, Options, Training, local  # type: ignore[import-not-found]

import powersgd_triton

SAVED_STEPS, LOADED_STEPS = 13, 5
GROUP_TIMEOUT = datetime.timedelta(seconds=300)
DEADLINE = 2500.0


# One case -------------------------------------------------------------------------------------------------------------


def feed(sha: Any, value: Any) -> None:
    """Add a value to a digest: tensors by their bytes, mappings by sorted keys."""
    if isinstance(value, Tensor):
        tensor = local(value.detach()).contiguous()
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value):
            sha.update(f"{key}:".encode())
            feed(sha, value[key])
    elif isinstance(value, (list, tuple)):
        sha.update(f"{len(value)} values".encode())
        for item in value:
            feed(sha, item)
    elif isinstance(value, bytes):
        feed(sha, torch.load(io.BytesIO(value), weights_only=True))
    else:
        sha.update(repr(value).encode())


def digest(value: Any) -> str:
    """sha256, shortened."""
    sha = hashlib.sha256()
    feed(sha, value)
    return sha.hexdigest()[:32]


def follow(training: Training, steps: range) -> Options:
    """Train, and note what must be equal."""
    sha = hashlib.sha256()
    for step in steps:
        if step == RESUMED_STEP and training.how.get("resume"):
            training.resume()
        training.step(step)
        feed(sha, [parameter.detach() for parameter in training.parameters()])
    found: Options = {"steps": sha.hexdigest()[:32], "parameters": digest(training.parameters())}
    found["state"] = digest(training.state.state_dict())
    if hasattr(training.state, "error"):
        found["error"] = digest(training.state.error())
    found["stats"] = training.state.compression_stats()
    found["finite"] = all(bool(local(parameter).isfinite().all()) for parameter in training.parameters())
    if isinstance(training, Ddp):
        found["buckets"] = training.buckets
    return found


def trained(worker: int, case: Case) -> Options:
    kind, options, how = case
    with contextlib.closing(kind(worker, options, **how)) as training:
        return follow(training, range(STEPS))


def saved(worker: int, case: Case, path: Path) -> Options:
    kind, options, how = case
    with contextlib.closing(kind(worker, options, **how)) as training:
        found = follow(training, range(SAVED_STEPS))
        training.save(path)
    return found


def loaded(worker: int, case: Case, path: Path) -> Options:
    kind, options, how = case
    with contextlib.closing(kind(worker, options, **how)) as training:
        training.load(path)
        return follow(training, range(SAVED_STEPS, SAVED_STEPS + LOADED_STEPS))


def work_for(command: str, folder: Path, workers: int) -> dict[str, Callable[[int], Options]]:
    """{name: function of the worker} for a group of so many workers."""
    if command in ("run", "run all"):
        chosen = quick(workers) if command == "run" else cases(workers)
        return {name: functools.partial(trained, case=case) for name, case in chosen.items()}
    if command == "save":
        return {name: functools.partial(saved, case=case, path=folder / name) for name, case in files(workers).items()}
    return {
        f"{name}{suffix}": functools.partial(loaded, case=case, path=folder / f"{name}{suffix}")
        for name, case in files(workers).items()
        for suffix in ([""] if "." in name else [".pt", ".safetensors"])
    }


# Groups of workers ----------------------------------------------------------------------------------------------------


def _work(worker: int, workers: int, command: str, folder: str, results: str, only: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group(
        "gloo", init_method=f"file://{results}/store", rank=worker, world_size=workers, timeout=GROUP_TIMEOUT
    )
    found: dict[str, Options] = {}
    for name, function in work_for(command, Path(folder), workers).items():
        if only not in name:
            continue
        began = time.monotonic()
        try:
            found[name] = {**function(worker), "seconds": time.monotonic() - began}
        # Some frameworks raise what is not derived from Exception.
        except BaseException:
            found[name] = {"failure": traceback.format_exc()}
            # The others may wait for this worker.
            break
        # What refers to a group in a cycle must not outlive the case.
        gc.collect()
    Path(results, str(worker)).write_text(json.dumps(found))
    if all("failure" not in result for result in found.values()):
        dist.barrier()
    # Gloo's threads now and then abort Python's shutdown.
    sys.stdout.flush()
    os._exit(0)


def group(workers: int, command: str, folder: str, only: str) -> dict[str, Any]:
    """Run a command's cases in one group: {name: {what: one value a worker}}."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as results:
        arguments = [(worker, workers, command, folder, results, only) for worker in range(workers)]
        context = mp.get_context("spawn")
        processes = [context.Process(target=_work, args=given, daemon=True) for given in arguments]
        deadline = time.monotonic() + DEADLINE
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        paths = [Path(results, str(worker)) for worker in range(workers)]
        texts = [path.read_text() if path.exists() else "{}" for path in paths]
    by_worker = [json.loads(text) for text in texts]
    names = list(dict.fromkeys(name for found in by_worker for name in found))
    merged: dict[str, Any] = {}
    for name in names:
        seen = [found.get(name, {"failure": "not done"}) for found in by_worker]
        keys = dict.fromkeys(key for result in seen for key in result)
        merged[f"{name} @{workers}"] = {key: [result.get(key) for result in seen] for key in keys}
    if "{}" in texts:
        merged[f"group @{workers}"] = {"failure": ["a worker ended early"]}
    return merged


def compare(paths: list[str]) -> int:
    """Print the cases in which two files differ; how many there are."""
    read = [json.loads(Path(path).read_text()) for path in paths]
    first, second = (file["cases"] for file in read)
    # A quick run has some of the cases only; two runs of one kind must have the same.
    quick_ones = [file["cases"].keys() for file in read if not file["all"]]
    names = quick_ones[0] if len(quick_ones) == 1 else first.keys() | second.keys()
    different = 0
    for name in sorted(names):
        ours, theirs = first.get(name, {}), second.get(name, {})
        keys = [k for k in ours | theirs if k != "seconds" and ours.get(k) != theirs.get(k)]
        if keys or "failure" in ours:
            different += 1
            print(f"{name}: {', '.join(keys) or 'failed in both'}")
    print(f"{len(names)} cases, {different} of them different")
    return different


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "compare", "save", "load"])
    parser.add_argument("paths", nargs="*", help="compare: two files; save, load: a folder")
    parser.add_argument("--all", action="store_true", help="run: all options on 1 and 3 workers too")
    parser.add_argument("--out", help="file for the digests")
    parser.add_argument("--only", default="", help="part of the names of the cases that are run")
    parser.add_argument("--workers", default="1,2,3,4", help="sizes of the groups")
    arguments = parser.parse_args()
    if arguments.command == "compare":
        sys.exit(compare(arguments.paths) > 0)
    folder = str(Path(*arguments.paths).resolve())
    if arguments.command == "save":
        Path(folder).mkdir(parents=True, exist_ok=True)
    command = "run all" if arguments.command == "run" and arguments.all else arguments.command
    began, found = time.monotonic(), dict[str, Any]()
    for workers in map(int, arguments.workers.split(",")):
        if not any(arguments.only in name for name in work_for(command, Path(folder), workers)):
            continue
        found |= group(workers, command, folder, arguments.only)
        print(f"{workers} workers: done after {time.monotonic() - began:.0f} s", file=sys.stderr)
    failed = {name: result["failure"] for name, result in found.items() if "failure" in result}
    for name, texts in failed.items():
        print(f"{name} failed:\n" + "\n".join(text or "" for text in texts), file=sys.stderr)
    package = str(Path(powersgd_triton.__file__).parent)
    text = json.dumps({"package": package, "all": arguments.all, "cases": found}, indent=1)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n")
    else:
        print(text)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
