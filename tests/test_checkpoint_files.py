"""Files of saved states: whole or not at all, and refused where they are damaged or something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig, checkpoint
from tests.support.checks import SHAPES, everything, gradients, same_bits, step

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = ["pt", "safetensors"]
Saved = dict[str, Any]


def trained(steps: int = 3, **fields: Any) -> Compressor:
    compressor = Compressor(everything(**fields), SHAPES)
    for seed in range(steps):
        step(compressor, gradients(seed))
    return compressor


def assert_equal(one: Saved, other: Saved) -> None:
    assert one.keys() == other.keys()
    for key in one.keys() - {"matrices"}:
        assert one[key] == other[key], key
    assert one["matrices"].keys() == other["matrices"].keys()
    for name, parts in one["matrices"].items():
        assert same_bits(parts, other["matrices"][name])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("fields", [{}, {"algorithm": "alternating", "error_dtype": "bf16"}, {"error_feedback": False}])
def test_round_trip(fields: dict[str, Any], suffix: str, tmp_path: Path):
    compressor = trained(**fields)
    saved = compressor.state_dict()
    path = tmp_path / f"state.{suffix}"
    checkpoint.save(saved, path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    loaded = checkpoint.load(str(path))
    assert_equal(saved, loaded)
    resumed = Compressor(everything(**fields), SHAPES)
    resumed.load_state_dict(loaded)
    assert same_bits(step(resumed, gradients(9)), step(compressor, gradients(9)))


def test_torch_loads_the_state_and_the_file_without_executing_anything(tmp_path: Path):
    saved = trained().state_dict()
    torch.save(saved, tmp_path / "by hand.pt")
    assert_equal(saved, torch.load(tmp_path / "by hand.pt", weights_only=True))
    checkpoint.save(saved, tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_with_dots_and_slashes(suffix: str, tmp_path: Path):
    shapes = {"a/b.weight": (8, 6), "a": (8, 6), "b.weight/error": (8, 6)}
    compressor = Compressor(everything(), shapes)
    step(compressor, gradients(0, shapes))
    checkpoint.save(compressor.state_dict(), tmp_path / f"s.{suffix}")
    assert_equal(compressor.state_dict(), checkpoint.load(tmp_path / f"s.{suffix}"))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_damage_is_found(suffix: str, tmp_path: Path):
    path = tmp_path / f"state.{suffix}"
    checkpoint.save(trained().state_dict(), path)
    content = path.read_bytes()
    running = trained()
    before = running.state_dict()
    missed = []
    for position in range(0, len(content), max(1, len(content) // 150)):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            state = checkpoint.load(path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
            continue
        # Padding, and copies of headers, hold nothing of the state.
        try:
            assert_equal(before, state)
        except AssertionError:
            missed.append(position)
    assert missed == []
    for length in (0, 1, 7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="not a saved PowerSGD state, or it is damaged"):
            checkpoint.load(path)


def test_foreign_files_are_refused(tmp_path: Path):
    torch.save({"model": {"w": torch.zeros(2)}}, tmp_path / "model.pt")
    torch.save([Compressor], tmp_path / "pickle.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match="is not a saved PowerSGD state"):
            checkpoint.load(path)
    with pytest.raises(OSError, match="missing"):
        checkpoint.load(tmp_path / "missing.pt")


def test_what_is_not_plain_is_refused_and_the_old_file_stays(tmp_path: Path):
    path = tmp_path / "state.pt"
    saved = trained().state_dict()
    checkpoint.save(saved, path)
    with pytest.raises(TypeError):
        checkpoint.save({**saved, "config": object()}, path)
    assert_equal(saved, checkpoint.load(path))


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "state.pt"
    saved = trained().state_dict()
    checkpoint.save(saved, path)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, function, crash)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(trained(5).state_dict(), path)
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
        assert_equal(saved, checkpoint.load(path))


# What is loaded into what ---------------------------------------------------------------------------------------------


def test_report_of_a_state_that_fits():
    report = Compressor(everything(), SHAPES).load_state_dict(trained().state_dict())
    assert sorted(report.loaded) == sorted(trained().state_dict()["matrices"])
    others = (report.carried, report.dropped, report.unused, report.added, report.waiting)
    assert not any(others)


def test_parameters_added_removed_and_renamed():
    saved = trained().state_dict()
    shapes = {"conv": SHAPES["conv"], "first": SHAPES["linear"], "new": (7, 9), "bias": (18,)}
    with pytest.raises(ValueError, match=r"missing from it: 'first', 'new'; only in it: .*strict=False"):
        Compressor(everything(), shapes).load_state_dict(saved)
    compressor = Compressor(everything(), shapes)
    report = compressor.load_state_dict(saved, strict=False, rename={"linear": "first"})
    assert report.loaded == ("conv", "first")
    assert report.added == ("new",)
    assert report.unused == ("column", "row", "twin")
    assert str(report) == "2 loaded ('conv', 'first'); 3 unused ('column', 'row', 'twin'); 1 added ('new')"
    owed = compressor.error()
    assert torch.equal(owed["first"], saved["matrices"]["linear"]["error"])
    step(compressor, gradients(0, shapes))
    assert sorted(compressor.state_dict()["matrices"]) == ["conv", "first", "new"]
    again = Compressor(everything(), shapes)
    assert again.load_state_dict(compressor.state_dict()).loaded == ("conv", "first", "new")


def test_another_size_is_left_out_if_asked():
    saved = trained().state_dict()
    compressor = Compressor(everything(), {**SHAPES, "twin": (20, 18), "row": (1, 3)})
    report = compressor.load_state_dict(saved, strict=False)
    assert report.unused == report.added == ("row", "twin")
    step(compressor, gradients(0, {**SHAPES, "twin": (20, 18), "row": (1, 3)}))


@pytest.mark.parametrize(
    ("rename", "message"),
    [({"nothing": "linear"}, "does not have: 'nothing'"), ({"linear": "twin"}, "would have the same name")],
)
def test_wrong_mapping_is_refused(rename: dict[str, str], message: str):
    running = trained()
    with pytest.raises(ValueError, match=message):
        running.load_state_dict(trained(2).state_dict(), rename=rename)
    assert running.iteration == 3


@pytest.mark.parametrize("spoiled", [(), (0,), (0, 1)], ids=["finite", "first step not finite", "two steps not finite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compressed_no_longer_is_paid_once(dtype: torch.dtype, spoiled: tuple[int, ...]):
    """At another rank nothing is worth compressing: all that is owed arrives with the next finite gradient."""
    source = Compressor(everything(), {"linear": (24, 18), "conv": (8, 27), "bias": (18,)})
    shapes: dict[str, tuple[int, ...]] = {"linear": (24, 18), "conv": (8, 27), "bias": (18,)}
    for seed in range(3):
        step(source, gradients(seed, shapes))
    saved = source.state_dict()
    exact = Compressor(PowerSGDConfig(rank=2, min_compression_rate=1e9), shapes)
    exact.attach(lambda: 4.0)
    report = exact.load_state_dict(saved)
    assert report.carried == ("conv", "linear")
    for seed in range(4):
        given = {name: (4 * g).to(dtype) for name, g in gradients(10 + seed, shapes).items()}
        if seed in spoiled:
            given["bias"][0] = float("nan")
        # A saved state in between has it too.
        again = exact.state_dict()
        out: dict[str, Tensor] = step(exact, given, torch.float32)
        if seed in spoiled:
            assert again["matrices"].keys() == {"conv", "linear"}
            continue
        first = seed == len(spoiled)
        for name in ("conv", "linear"):
            owed = 4 * saved["matrices"][name]["error"].view(shapes[name]) if first else torch.zeros(shapes[name])
            assert torch.equal(out[name], given[name].float() + owed)
    assert not exact.error()


def test_newly_compressed_matrices_are_no_mistake():
    shapes = {"linear": (24, 18), "small": (4, 4)}
    for rate, loaded in ((1e9, ()), (2, ("linear",))):
        saving = Compressor(PowerSGDConfig(rank=2, min_compression_rate=rate), shapes)
        step(saving, gradients(0, shapes))
        compressor = Compressor(everything(), shapes)
        assert compressor.load_state_dict(saving.state_dict()).loaded == loaded
        step(compressor, gradients(1, shapes))
        assert compressor.error().keys() == {"linear", "small"}


# Files that claim more than they have -------------------------------------------------------------------------------

FORGERIES = """
import io, json, pickle, resource, sys, zipfile
import torch
from powersgd_triton import Compressor, PowerSGDConfig, checkpoint

SIZE = 16_000  # 1 GB
compressor = Compressor(PowerSGDConfig(rank=2, min_compression_rate=0), {"w": (8, 6), "b": (3,)})
compressor.decompress(compressor.compress({"w": torch.ones(8, 6), "b": torch.ones(3)}))
saved = compressor.state_dict()
expanded = torch.ones(()).expand(SIZE, SIZE)
overlapping = torch.ones(2 * SIZE).as_strided((SIZE, SIZE), (1, 1))


def with_error(error, tensors=None):
    matrices = {"w": {**saved["matrices"]["w"], "error": error}}
    return {**saved, "matrices": matrices, "tensors": tensors or saved["tensors"]}


def claimed(error):
    state = with_error(error, {"w": [*error.shape, 2], "b": [1, 3, 0]})
    del state["fingerprint"]
    return state


def written(tensors, path):
    text = json.dumps({key: value for key, value in saved.items() if key != "matrices"} | {"matrices": ["w"]})
    torch.save({checkpoint.FORMAT: text, "checksum": "0", "tensors": tensors}, path)
    return path


def compressed_file():
    written({"w/error": torch.zeros(3)}, "small.pt")
    with zipfile.ZipFile("small.pt") as source, zipfile.ZipFile("zip.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            content = source.read(entry)
            target.writestr(entry.filename, bytes(SIZE * SIZE // 2) if "data/" in entry.filename else content)
    return "zip.pt"


def shared():
    # Many names of one storage.
    tensor = torch.zeros(1000, 1000)
    return written({f"w{number}/error": tensor for number in range(300)}, "shared.pt")


def safetensors():
    header = {"w/error": {"dtype": "F32", "shape": [SIZE, SIZE], "data_offsets": [0, 4 * SIZE * SIZE]}}
    text = json.dumps({"__metadata__": {checkpoint.FORMAT: "{}", "checksum": "0"}, **header}).encode()
    with open("forged.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + bytes(64))
    return "forged.safetensors"


def older():
    torch.save({"tensors": {"w/error": expanded}}, "older.pt", _use_new_zipfile_serialization=False)
    return "older.pt"


ATTEMPTS = {
    "expanded in a file": lambda: checkpoint.load(written({"w/error": expanded}, "expanded.pt")),
    "overlapping in a file": lambda: checkpoint.load(written({"w/error": overlapping}, "overlapping.pt")),
    "compressed file": lambda: checkpoint.load("zip.pt"),
    "one storage with many names": lambda: checkpoint.load(shared()),
    "safetensors": lambda: checkpoint.load(safetensors()),
    "older format": lambda: checkpoint.load(older()),
    "expanded in a state": lambda: compressor.load_state_dict(with_error(expanded)),
    "expanded in a state that claims its size": lambda: compressor.load_state_dict(claimed(expanded)),
    "overlapping in a state": lambda: compressor.load_state_dict(claimed(overlapping)),
    "not strict": lambda: compressor.load_state_dict(claimed(expanded), strict=False),
}
if sys.argv[1:]:
    compressed_file()
    sys.exit()
for name, attempt in ATTEMPTS.items():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        attempt()
        said = "nothing"
    except Exception as error:
        said = type(error).__name__
    print(json.dumps([name, said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024]))
"""


def test_sizes_are_compared_before_memory_is_taken(tmp_path: Path):
    """A peak in MB is that of the whole process, so that the large ones would come first."""

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", FORGERIES, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    run("make the compressed file")
    found = [json.loads(line) for line in run().splitlines()]
    assert len(found) == 10
    for name, said, megabytes in found:
        assert (name, said) == (name, "ValueError")
        assert megabytes < 100, name
