"""Tests treat their models' messages as large. Else all buckets would be joined, and exchanges be all-reduces.

And whose exchanges these are.
"""

import contextlib
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# The planner takes its copy of the constants before they change.
import powersgd_triton.ranks.planner  # noqa: F401
from powersgd_triton.comm import exchange

DEFAULTS: dict[str, Any] = {name: getattr(exchange, name) for name in ("SMALL", "SMALL_PART", "JOINED")}


def bytes_decide() -> None:
    """From now on no message is small."""
    exchange.SMALL = exchange.SMALL_PART = exchange.JOINED = 0


def latency_decides() -> Any:
    """A context in which messages are small as they are for users."""
    return mock.patch.multiple(exchange, **DEFAULTS)


class Watch(TorchDispatchMode):
    """Notes the name and the workers of each collective, and the elements of each all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.reduced: list[int] = []
        self.groups: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append(func.overloadpacket.__name__)
            if self.calls[-1] == "allreduce_":
                self.reduced += [tensor.numel() for tensor in args[0]]
            for argument in (*args, *(kwargs or {}).values()):
                with contextlib.suppress(Exception):
                    group = dist.ProcessGroup.unbox(argument)
                    self.groups.append(tuple(sorted(dist.get_process_group_ranks(group))))
        return func(*args, **(kwargs or {}))
