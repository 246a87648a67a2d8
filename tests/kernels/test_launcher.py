"""When kernels are launched directly, and when Triton launches them."""

import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import triton

from powersgd_triton.kernels import launcher
from powersgd_triton.kernels.launcher import Launches, run

OPTIONS = {"num_warps": 4, "C": 16}


class Kernel:
    """A kernel with the parameters (tensor, scalar, number, TYPE, C), which notes who launches it."""

    __name__ = "kernel"

    def __init__(self, *, marked: bool = True) -> None:
        self.direct: list[tuple[Any, ...]] = []
        self.by_triton: list[tuple[Any, ...]] = []
        self.pre_run_hooks: list[object] = []
        self.params = [
            types.SimpleNamespace(name=name, do_not_specialize=fixed)
            for name, fixed in [("tensor", False), ("scalar", True), ("number", marked), ("TYPE", False), ("C", False)]
        ]

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Compiled:
            self.by_triton.append((grid, *arguments, named))
            return Compiled(
                run=lambda *arguments: self.direct.append(arguments), function="function", packed_metadata="metadata"
            )

        return launch


Compiled = types.SimpleNamespace


@pytest.fixture(autouse=True)
def driver() -> Iterator[types.SimpleNamespace]:
    found = types.SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 70 + device)
    runtime = types.SimpleNamespace(driver=types.SimpleNamespace(active=found))
    with (
        mock.patch.multiple(launcher, JITFunction=Kernel, CompiledKernel=Compiled, KNOWN=True),
        mock.patch.object(triton, "runtime", runtime),
        mock.patch.dict(launcher._known, clear=True),
    ):
        yield found


ROW = torch.zeros(4, dtype=torch.int64)
TENSOR, SCALAR = torch.zeros(64), ROW[1]


def launch(kernel: Kernel, tensor: torch.Tensor = TENSOR, scalar: torch.Tensor = SCALAR, kind: str = "fp32") -> None:
    run(kernel, (5,), OPTIONS, tensor, scalar, 3, TYPE=kind)


def test_the_second_launch_is_direct():
    kernel = Kernel()
    for _ in range(3):
        launch(kernel)
    assert kernel.by_triton == [((5,), TENSOR, SCALAR, 3, {"TYPE": "fp32", **OPTIONS})]
    expected = (5, 1, 1, 70, "function", "metadata", None, None, None, TENSOR.data_ptr(), SCALAR.data_ptr(), 3)
    assert kernel.direct == [(*expected, "fp32", 16)] * 2
    # Tensors that move are found, and other constants are compiled.
    other, row = torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    launch(kernel, other, row[3])
    assert kernel.direct[-1][9:11] == (other.data_ptr(), row[3].data_ptr())
    launch(kernel, kind="bf16")
    assert (len(kernel.by_triton), len(kernel.direct)) == (2, 3)
    with pytest.raises(TypeError, match="name number in do_not_specialize"):
        launch(Kernel(marked=False))


def test_other_options_another_device_and_what_is_not_aligned_are_compiled(driver: types.SimpleNamespace):
    """Tensors for which a kernel is not compiled may start anywhere."""
    kernel = Kernel()
    launch(kernel)
    run(kernel, (5,), dict(OPTIONS), TENSOR, SCALAR, 3, TYPE="fp32")
    launch(kernel, TENSOR[1:])
    launch(kernel, TENSOR[1:])
    assert len(kernel.by_triton) == 4
    launch(kernel, scalar=ROW[3])
    assert len(kernel.direct) == 1
    driver.get_current_device = lambda: 1
    launch(kernel)
    launch(kernel)
    assert len(kernel.by_triton) == 5
    assert kernel.direct[1][3] == 71


class Part:
    """Two launches of a step, of which one takes what moves."""

    def __init__(self) -> None:
        self.kernel, self.launches, self.inspected = Kernel(), Launches(), 0

    def __call__(self, tensor: torch.Tensor, scalar: torch.Tensor, *fixed: object) -> list[tuple[Any, ...]]:
        """Return the arguments of the direct launches."""
        self.kernel.direct.clear()
        self.launches.run(lambda: self._launch(tensor, scalar), fixed, [tensor, scalar])
        return [taken[9:11] for taken in self.kernel.direct]

    def _launch(self, tensor: torch.Tensor, scalar: torch.Tensor) -> None:
        self.inspected += 1
        launch(self.kernel, tensor, scalar)
        launch(self.kernel)


def addresses(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def test_launches_are_repeated_with_what_has_moved(driver: types.SimpleNamespace):
    part, numbers = Part(), torch.zeros(8, dtype=torch.int64)
    tensors = torch.zeros(4, 64).unbind()
    for step, tensor in enumerate(tensors):
        expected = [addresses(tensor, numbers[step]), addresses(TENSOR, SCALAR)]
        # The first launch is compiled by Triton.
        assert part(tensor, numbers[step]) == expected[step == 0 :]
    assert part.inspected == 2
    # Something else decides now, or the device is another one.
    part(tensors[0], numbers[0], "other")
    part(tensors[1], numbers[1], "other")
    assert part.inspected == 3
    driver.get_current_device = lambda: 1
    for tensor in tensors[:3]:
        part(tensor, numbers[0], "other")
    assert part.inspected == 5
    assert part.kernel.direct[0][3] == 71


def test_triton_launches_for_hooks_in_captures_and_in_unknown_versions():
    """Each launch, so that those of a part are not repeated either."""
    part, hooks = Part(), triton.knobs.runtime
    part(TENSOR, SCALAR)
    ways: list[Any] = [
        mock.patch.object(part.kernel, "pre_run_hooks", [print]),
        mock.patch.object(hooks.launch_enter_hook, "calls", [print]),
        mock.patch.object(hooks.launch_exit_hook, "calls", [print]),
        # As in versions without chains of hooks.
        mock.patch.object(hooks, "launch_enter_hook", print),
        mock.patch.multiple(launcher, HAS_DEVICE=True, torch=mock.Mock(Tensor=torch.Tensor)),
        mock.patch.object(launcher, "KNOWN", False),
    ]
    for way in ways:
        # So that there is something to repeat.
        part(TENSOR, SCALAR)
        inspected, by_triton = part.inspected, len(part.kernel.by_triton)
        with way:
            assert part(TENSOR, SCALAR) == []
        assert (part.inspected, len(part.kernel.by_triton)) == (inspected + 1, by_triton + 2)
    with mock.patch.object(hooks, "launch_enter_hook", None):
        assert part(TENSOR, SCALAR) == [addresses(TENSOR, SCALAR)] * 2
    # What is compiled for multiples of 16 bytes must start there.
    assert len(part(TENSOR[1:], SCALAR)) == 1
    assert part(TENSOR, SCALAR)[0] == addresses(TENSOR, SCALAR)


def test_a_part_that_fails_is_not_repeated():
    part, calls = Part(), []
    for _ in range(2):
        part(TENSOR, SCALAR)
    with (
        mock.patch.object(part, "_launch", side_effect=ValueError("it fails")),
        pytest.raises(ValueError, match="it fails"),
    ):
        part(TENSOR, SCALAR, "other")
    launch(part.kernel)
    assert not part.launches._noted
    part.launches.run(lambda: calls.append(1), ("other",), [])
    assert calls == [1]
