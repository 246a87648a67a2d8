"""A CUDA graph without a GPU: operations and kernels of Triton's interpreter, noted once and run again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from powersgd_triton.core import capture as captures


class FakeGraph(TorchDispatchMode):
    """Notes what is enqueued while it is entered. Nothing has happened afterwards, until ``replay``.

    Args:
        memory: Tensors that kernels reach through addresses.

    Attributes:
        work: What a replay runs: one function for each launch.
    """

    def __init__(self, memory: list[torch.Tensor]) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []
        self._before = {tensor.untyped_storage()._cdata: (tensor, tensor.clone()) for tensor in memory}
        self._new: set[int] = set()
        self._in_kernel = False

    def replay(self) -> None:
        for work in self.work:
            work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_kernel:
            return func(*args, **kwargs)
        self._save([*args, *kwargs.values()])
        result = func(*args, **kwargs)
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and self._is_new(leaf)]
        self._new |= {tensor.untyped_storage()._cdata for tensor in new}

        def work() -> None:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            if new:
                for place, value in zip(tree_leaves(result), again, strict=True):
                    place.copy_(value)

        if new or func._schema.is_mutable:
            self.work.append(work)
        return result

    def note_kernel(self, run: Callable[[], None], arguments: Any) -> None:
        self.work.append(run)
        self._in_kernel = True
        try:
            self._save(arguments)
            run()
        finally:
            self._in_kernel = False

    def undo(self) -> None:
        """Give all memory the values of before."""
        for tensor, value in self._before.values():
            tensor.copy_(value)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._before.keys() | self._new

    def _save(self, arguments: Any) -> None:
        for tensor in [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]:
            if self._is_new(tensor):
                storage = tensor.untyped_storage()
                numel = storage.nbytes() // tensor.itemsize
                whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (numel,), (1,))
                self._before[storage._cdata] = whole, whole.clone()


@contextlib.contextmanager
def captured(memory: list[torch.Tensor]) -> Iterator[FakeGraph]:
    """Capture the block in a graph."""
    graph, launch = FakeGraph(memory), interpreter.GridExecutor.__call__

    def noted(executor: Any, *args: Any, **kwargs: Any) -> None:
        graph.note_kernel(lambda: launch(executor, *args, **kwargs), args)

    with (
        contextlib.ExitStack() as stack,
        mock.patch.object(captures, "is_captured", return_value=True),
        mock.patch.object(interpreter.GridExecutor, "__call__", noted),
        graph,
    ):
        stack.callback(graph.undo)
        yield graph
