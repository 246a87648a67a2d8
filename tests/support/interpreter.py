"""Triton's interpreter: what a step does in it (bytes moved, launches that a device would see); a faster one."""

import contextlib
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

CHECKED = interpreter.interpreter_builder.options
"""Options with which integers that overflow are an error."""


def make_faster() -> None:
    """Remember what the interpreter looks up again and again, which takes longer than the kernels of the tests.

    These are the members of Triton's language, which it replaces for each kernel, NumPy's dtypes, and what types and
    shapes become. Operands that need no other type are not asked for theirs. Overflows are not looked for.
    """
    dtypes: dict[str, Any] = {}
    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is interpreter.tl or value is core]

    def patch_once(fn: Any) -> Any:
        return patch(fn) if any(core.is_builtin(language.load) for language in languages(fn)) else None

    def remembered(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind)
        return dtypes[name]

    block, equal, broadcast = core.block_type.__init__, core.tuple.__eq__, TritonSemantic.broadcast_impl_value
    check = TritonSemantic.binary_op_type_checking_impl

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> Any:
        """Return a shape, which is one object for all types that have it, with the types of each kind of element."""
        shape, constants = core.tuple(list(sizes)), core.tuple([core.constexpr(size) for size in sizes])
        shape.of_tensors, shape.kinds, shape.sizes = (constants, core.constexpr(math.prod(sizes))), {}, sizes
        return shape

    def block_type(self: Any, kind: Any, shape: Any) -> None:
        block(self, kind, shape)
        self.shape = shape_of(tuple(self.shape))

    def typed(kind: Any, shape: Any) -> Any:
        if not hasattr(shape, "kinds"):
            return core.block_type(kind, shape)
        key = kind.name, getattr(kind, "address_space", 0), getattr(kind, "const", False)
        if key not in shape.kinds:
            shape.kinds[key] = core.block_type(kind, shape)
        return shape.kinds[key]

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.shape.of_tensors if kind.is_block() else scalar

    def same(self: Any, other: Any) -> Any:
        return core.constexpr(True) if self is other else equal(self, other)

    @functools.cache
    def joined(one: tuple[int, ...], other: tuple[int, ...]) -> Any:
        return shape_of(np.broadcast_shapes(one, other))

    def spread(value: Any, shape: Any) -> Any:
        if value.type.shape is shape:
            return value
        handle = interpreter.TensorHandle(np.broadcast_to(value.handle.data, shape.sizes), value.handle.dtype.scalar)
        return core.tensor(handle, typed(value.dtype, shape))

    def broadcast_once(self: Any, one: Any, other: Any) -> Any:
        first, second = (getattr(each.type, "shape", None) for each in (one, other))
        if first is second:
            return one, other
        if first is None or second is None:
            return broadcast(self, one, other)
        shape = joined(first.sizes, second.sizes)
        return spread(one, shape), spread(other, shape)

    def operand(self: Any, value: Any, kind: Any) -> Any:
        """A value of this type, which a number takes, or None where Triton's own rules must decide."""
        if value.__class__ is core.tensor:
            return value if value.dtype is kind else None
        whole = value.__class__ is int and abs(value) < 1 << 31
        real = value.__class__ is float and kind is core.float32
        return self.scalar_constant(value, dtype=kind) if whole or real else None

    def checked(self: Any, one: Any, other: Any, *rest: Any, **named: Any) -> Any:
        kind = getattr(one if one.__class__ is core.tensor else other, "dtype", None)
        if kind is core.float32 or kind is core.int32:
            first, second = operand(self, one, kind), operand(self, other, kind)
            if first is not None and second is not None:
                return broadcast_once(self, first, second)
        return check(self, one, other, *rest, **named)

    def patch_attr(place: Any, name: str, member: Any, _: Any, *scope: Any) -> None:
        def call(*arguments: Any, _semantic: Any = None, **named: Any) -> Any:
            return member.__wrapped__(*arguments, **named, _semantic=interpreter.interpreter_semantic)

        (scope[0].set_attr if scope else setattr)(place, name, call)

    def remember(name: str) -> None:
        """Of a function of types and plain numbers."""
        once = functools.lru_cache(1 << 14)(
            functools.partial(getattr(TritonSemantic, name), interpreter.interpreter_semantic)
        )
        setattr(TritonSemantic, name, lambda _, *arguments, **named: once(*arguments, **named))

    scalar = shape_of(()).of_tensors
    core.block_type.__init__ = block_type
    core.block_type.with_element_ty = lambda self, kind: typed(kind, self.shape)
    interpreter.InterpreterBuilder.get_block_ty = lambda _, kind, shape: typed(kind, shape)
    core.tuple.__eq__, core.tensor.__init__ = same, tensor
    TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl = broadcast_once, checked
    remember("computation_type_impl")
    remember("scalar_constant")
    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = dataclasses.replace(CHECKED, sanitize_overflow=False)
    interpreter._get_np_dtype = remembered


def make_exact() -> None:
    """Compute ``tl.dot`` in one order, with the same bits on every CPU and in blocks of every shape.

    The interpreter's own calls a BLAS, whose order of summation depends on both.
    """

    def create_dot(_: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        return interpreter.TensorHandle(dot(a.data, b.data, accumulator.data), accumulator.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def dot(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray) -> np.ndarray:
    """accumulator + a b, in one order: NumPy adds rows of more than one element one after the other."""
    if not {a.dtype, b.dtype} <= {np.dtype(np.float32), np.dtype(np.float64)}:
        raise TypeError(f"expected products of fp32 or fp64 values; got {a.dtype} and {b.dtype}")
    assert a.shape[0] * b.shape[1] > 1
    # What is beyond a factor's rank is zero on both sides, and changes no sum.
    used = a.any(axis=0) | b.any(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        terms = a.T[used, :, None].astype(np.float64) * b[used, None, :].astype(np.float64)
        total: np.ndarray = accumulator + np.add.reduce(terms, axis=0)
    return total.astype(accumulator.dtype)


@contextlib.contextmanager
def random_order(seed: int) -> Iterator[None]:
    """Within, the programs of a launch run in a random order: instead of each one, another."""
    builder, draw, order = interpreter.InterpreterBuilder, random.Random(seed), list[tuple[int, ...]]()
    set_sizes, set_index = builder.set_grid_dim, builder.set_grid_idx

    def shuffle(self: Any, *sizes: int) -> None:
        order[:] = itertools.product(*map(range, sizes))
        draw.shuffle(order)
        set_sizes(self, *sizes)

    with (
        mock.patch.object(builder, "set_grid_dim", shuffle),
        mock.patch.object(builder, "set_grid_idx", lambda self, *_: set_index(self, *order.pop())),
    ):
        yield


class Activity(TorchDispatchMode):
    """What runs within: kernels and torch's operations that would run something on a device.

    Attributes:
        kernels: Names in order.
        loaded, stored: Bytes that each kernel moves (only what is not masked).
        operations: Names of those that are neither views nor allocations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.loaded: list[int] = []
        self.stored: list[int] = []
        self.operations: list[str] = []
        self.in_kernel = False

    @property
    def moved(self) -> int:
        return sum(self.loaded) + sum(self.stored)

    @property
    def launches(self) -> list[str]:
        return self.kernels + self.operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
        results = result if isinstance(result, list | tuple) else [result]
        view = all(isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() in inputs for r in results)
        allocates = func.overloadpacket.__name__.startswith(("empty", "new_empty"))
        if not self.in_kernel and not allocates and (func._schema.is_mutable or not view):
            self.operations.append(str(func))
        return result


@contextlib.contextmanager
def watched(
    *,
    run_kernels: bool = True,
    at_launch: Callable[[str, Sequence[Any]], None] = lambda *_: None,
    at_access: Callable[[np.ndarray], None] = lambda _: None,
) -> Iterator[Activity]:
    """Everything within is counted; without ``run_kernels`` launches are counted only.

    ``at_launch`` is called with each kernel's name and arguments, ``at_access`` with the addresses that it reaches.
    """
    activity = Activity()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, run = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def count(sizes: list[int], ptrs: Any, mask: Any) -> None:
        reached = ptrs.data[mask.data.astype(bool)]
        sizes[-1] += reached.size * (ptrs.get_element_ty().primitive_bitwidth // 8)
        at_access(reached)

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        count(activity.loaded, ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count(activity.stored, ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def counted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        at_launch(self.fn.__name__, args)
        activity.kernels.append(self.fn.__name__)
        activity.loaded.append(0)
        activity.stored.append(0)
        activity.in_kernel = True
        try:
            return run(self, *args, **kwargs) if run_kernels else None
        finally:
            activity.in_kernel = False

    with (
        mock.patch.object(builder, "create_masked_load", counted_load),
        mock.patch.object(builder, "create_masked_store", counted_store),
        mock.patch.object(executor, "__call__", counted_run),
        activity,
    ):
        yield activity
