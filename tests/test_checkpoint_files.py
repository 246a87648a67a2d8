"""Files of saved states: whole or not at all, refused where they are damaged or claim too much; and what is loaded."""

import json
import os
import resource
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig, checkpoint
from tests.support.checks import SHAPES, assert_equal_states, everything, gradients, step, trained
from tests.support.distributed import forkserver
from tests.support.training import complaint

Shapes = dict[str, tuple[int, ...]]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_every_damage_is_found(suffix: str, tmp_path: Path):
    # Names with dots and slashes.
    shapes: Shapes = {"a/b.weight": (24, 18), "a": (8, 6), "b.weight/error": (8, 6)}
    compressor = Compressor(everything(), shapes)
    step(compressor, gradients(0, shapes))
    path, saved = tmp_path / f"state.{suffix}", compressor.state_dict()
    checkpoint.save(saved, path)
    assert_equal_states(saved, checkpoint.load(path))
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 150)):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            state = checkpoint.load(path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            # Padding, and copies of headers, hold nothing of the state.
            assert_equal_states(saved, state)
    for length in (0, 1, 7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="not a saved PowerSGD state, or it is damaged"):
            checkpoint.load(path)


def test_foreign_files_are_refused(tmp_path: Path):
    torch.save({"model": {"w": torch.zeros(2)}}, tmp_path / "model.pt")
    torch.save([Compressor], tmp_path / "pickle.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match="is not a saved PowerSGD state"):
            checkpoint.load(path)
    torch.save(Compressor(PowerSGDConfig(), {}).state_dict(), tmp_path / "saved.pt")
    with pytest.raises(ValueError, match=r"pass torch.load\(path\) in place of the path"):
        checkpoint.load(tmp_path / "saved.pt")
    with pytest.raises(OSError, match="missing"):
        checkpoint.load(tmp_path / "missing.pt")


def test_an_interrupted_call_leaves_the_old_file(tmp_path: Path):
    path, saved, later = tmp_path / "state.pt", trained(3).state_dict(), trained(5).state_dict()
    checkpoint.save(saved, path)
    # The file is no archive that torch would not read by itself.
    torch.load(path, weights_only=True)

    for function in ("fsync", "replace"):
        with mock.patch.object(os, function, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            checkpoint.save(later, path)
    with pytest.raises(TypeError):
        checkpoint.save({**later, "config": object()}, path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert_equal_states(saved, checkpoint.load(path))


def test_parameters_added_removed_renamed_and_resized():
    saved = trained(3).state_dict()
    whole = trained(0).load_state_dict(saved)
    assert sorted(whole.loaded) == sorted(saved["matrices"])
    assert not any((whole.carried, whole.dropped, whole.unused, whole.added, whole.waiting))
    shapes: Shapes = {"conv": SHAPES["conv"], "first": SHAPES["linear"], "new": (7, 9), "bias": (18,)}
    with pytest.raises(ValueError, match=r"missing from it: 'first', 'new'; only in it: .*strict=False"):
        Compressor(everything(), shapes).load_state_dict(saved)
    compressor = Compressor(everything(), shapes)
    report = compressor.load_state_dict(saved, strict=False, rename={"linear": "first"})
    assert (report.loaded, report.added) == (("conv", "first"), ("new",))
    assert report.unused == ("column", "row", "twin")
    assert str(report) == "2 loaded ('conv', 'first'); 3 unused ('column', 'row', 'twin'); 1 added ('new')"
    assert torch.equal(compressor.error()["first"], saved["matrices"]["linear"]["error"])
    step(compressor, gradients(0, shapes))
    again = Compressor(everything(), shapes)
    assert again.load_state_dict(compressor.state_dict()).loaded == ("conv", "first", "new")

    running = trained(3)
    for rename, said in (({"nothing": "linear"}, "not have: 'nothing'"), ({"linear": "twin"}, "have the same name")):
        with pytest.raises(ValueError, match=said):
            running.load_state_dict(saved, rename=rename)
    assert running.iteration == 3
    # Another size is left out, if asked.
    sizes: Shapes = {**SHAPES, "twin": (20, 18), "row": (1, 3)}
    resized = Compressor(everything(), sizes)
    report = resized.load_state_dict(saved, strict=False)
    assert report.unused == report.added == ("row", "twin")
    step(resized, gradients(0, sizes))


@pytest.mark.parametrize("spoiled", [(), (0,), (0, 1)], ids=["finite", "first step not finite", "two steps not finite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compressed_no_longer_is_paid_once(dtype: torch.dtype, spoiled: tuple[int, ...]):
    """At another rank nothing is worth compressing: all that is owed arrives with the next finite gradient."""
    shapes: Shapes = {"linear": (24, 18), "conv": (8, 27), "bias": (18,)}
    source = Compressor(everything(), shapes)
    for seed in range(3):
        step(source, gradients(seed, shapes))
    saved = source.state_dict()
    exact = Compressor(PowerSGDConfig(rank=2, min_compression_rate=1e9), shapes)
    exact.attach(lambda: 4.0)
    assert exact.load_state_dict(saved).carried == ("conv", "linear")
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
        for name in ("conv", "linear"):
            owed = 4 * saved["matrices"][name]["error"].view(shapes[name]) * (seed == len(spoiled))
            assert torch.equal(out[name], given[name].float() + owed)
    assert not exact.error()


def test_newly_compressed_matrices_are_no_mistake():
    shapes: Shapes = {"linear": (24, 18), "small": (4, 4)}
    for rate, loaded in ((1e9, ()), (2, ("linear",))):
        saving = Compressor(PowerSGDConfig(rank=2, min_compression_rate=rate), shapes)
        step(saving, gradients(0, shapes))
        compressor = Compressor(everything(), shapes)
        assert compressor.load_state_dict(saving.state_dict()).loaded == loaded
        step(compressor, gradients(1, shapes))
        assert compressor.error().keys() == {"linear", "small"}


SIZE = 16_000
"""A matrix of this size takes 1 GB."""


def forge(folder: str) -> None:
    """Try to load each forgery. Write [its name, the exception, by how many MB the process's peak has grown]."""
    os.chdir(folder)
    compressor = Compressor(everything(), {"w": (8, 6), "b": (3,)})
    compressor.compress({"w": torch.ones(8, 6), "b": torch.ones(3)})
    saved = compressor.state_dict()
    rest = json.dumps({**{key: value for key, value in saved.items() if key != "matrices"}, "matrices": ["w"]})
    expanded, small = torch.ones(()).expand(SIZE, SIZE), torch.zeros(1000, 1000)
    overlapping = torch.ones(2 * SIZE).as_strided((SIZE, SIZE), (1, 1))

    def written(path: str, tensors: dict[str, Tensor]) -> str:
        torch.save({checkpoint.FORMAT: rest, "checksum": "0", "tensors": tensors}, path)
        return path

    source = zipfile.ZipFile(written("small.pt", {"w/error": torch.zeros(3)}))
    with source, zipfile.ZipFile("compressed.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            with target.open(entry.filename, "w") as file:
                for block in [bytes(1 << 20)] * 128 if "data/" in entry.filename else [source.read(entry)]:
                    file.write(block)
    header = {"w/error": {"dtype": "F32", "shape": [SIZE, SIZE], "data_offsets": [0, 4 * SIZE * SIZE]}}
    text = json.dumps({"__metadata__": {checkpoint.FORMAT: "{}", "checksum": "0"}, **header}).encode()
    Path("forged.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    torch.save({"tensors": {"w/error": expanded}}, "older.pt", _use_new_zipfile_serialization=False)
    written("expanded.pt", {"w/error": expanded})
    written("overlapping.pt", {"w/error": overlapping})
    written("shared.pt", {f"w{number}/error": small for number in range(300)})

    def state(error: Tensor, **others: Any) -> dict[str, Any]:
        return {**saved, "matrices": {"w": {**saved["matrices"]["w"], "error": error}}, **others}

    def claimed(error: Tensor) -> dict[str, Any]:
        forged = state(error, tensors={"w": [*error.shape, 2], "b": [1, 3, 0]})
        del forged["fingerprint"]
        return forged

    files = ("expanded.pt", "overlapping.pt", "compressed.pt", "shared.pt", "forged.safetensors", "older.pt")
    attempts: dict[str, Any] = {path: lambda path=path: checkpoint.load(path) for path in files}
    for name, forged in (("expanded", state(expanded)), ("claimed", claimed(expanded)), ("rows", claimed(overlapping))):
        for strict in (True, False):
            attempts[f"{name}, strict={strict}"] = lambda forged=forged, strict=strict: compressor.load_state_dict(
                forged, strict=strict
            )
    found = []
    for name, attempt in attempts.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kind = complaint(attempt).partition(":")[0]
        found.append([name, kind, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024])
    Path("found.json").write_text(json.dumps(found))


def test_sizes_are_compared_before_memory_is_taken(tmp_path: Path):
    """In a process of its own, since a peak is that of the whole process: the large ones would come first."""
    process = forkserver().Process(target=forge, args=(str(tmp_path),))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 12
    for name, said, megabytes in found:
        assert (name, said) == (name, "ValueError")
        assert megabytes < 100, name
