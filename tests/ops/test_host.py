"""The library in C, and memory of the CPU: freed memory is used again, as new memory takes longer than to compute."""

import ctypes
import mmap
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from powersgd_triton.ops import host
from powersgd_triton.ops.host import LARGE, new_memory

CPU = torch.device("cpu")


def test_a_library_that_was_built_for_other_arguments_is_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "INTERFACE", "powersgd_interface_0")
    assert host.library.__wrapped__() is None


@pytest.mark.skipif(host.library() is None, reason="there was no C compiler")
def test_the_openmp_of_torch_is_made_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some processors, torch loads it for itself only, so that the library's functions are not found."""
    modes, load = list[int](), ctypes.CDLL

    def strict(path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
        if "omp" in Path(path).name:
            modes.append(mode)
        elif not modes:
            raise OSError("undefined symbol: GOMP_parallel")
        return load(path, mode=mode)

    monkeypatch.setattr(ctypes, "CDLL", strict)
    assert host.library.__wrapped__() is not None
    assert modes == [ctypes.RTLD_GLOBAL]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can take freed memory back")
def test_memory_is_used_again_when_it_is_free():
    host._spare.clear()
    first, second = (new_memory(LARGE, torch.float32, CPU).fill_(value) for value in (1, 2))
    places = first.data_ptr(), second.data_ptr()
    part = first[1:9]
    del first
    third = new_memory(LARGE, torch.float32, CPU).fill_(3)
    assert third.data_ptr() not in places
    assert part.eq(1).all()
    assert second.eq(2).all()
    del part
    # Another size, of another dtype.
    other = new_memory(LARGE, torch.int8, CPU)
    assert (other.dtype, len(other)) == (torch.int8, LARGE)
    assert other.data_ptr() not in places
    # What was freed last, whose pages are the least likely to have been taken.
    del second
    assert new_memory(LARGE, torch.float32, CPU).data_ptr() == places[1]
    with mock.patch.object(mmap, "mmap", side_effect=OSError("no addresses")):
        assert new_memory(3 * LARGE, torch.int8, CPU).shape == (3 * LARGE,)
    assert not host._spare


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can take freed memory back")
def test_memory_is_used_again_by_a_python_that_lacks_the_advice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(mmap, "MADV_FREE", raising=False)
    place = new_memory(LARGE, torch.float32, CPU).data_ptr()
    assert new_memory(LARGE, torch.float32, CPU).data_ptr() == place


def test_small_memory_and_that_of_other_devices_is_torchs():
    assert new_memory(7, torch.float32, CPU).shape == (7,)
    assert new_memory(LARGE, torch.float32, torch.device("meta")).is_meta
