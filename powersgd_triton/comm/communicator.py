"""Collectives of one process group."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.comm.control import Control, DisagreementError, control_of, uses_gloo, wait_and_look
from powersgd_triton.comm.nodes import AUTO, NodeGroup, given_groups, make_groups, own_place
from powersgd_triton.config import logger

Work = Callable[[], object] | None
"""Waits for a collective under way. None if nothing had to be sent."""


class Communicator:
    """Collectives of one process group. In a single process without a group, they do nothing.

    Args:
        group: Process group. None uses the default group, or a single process if no group is initialized.
        others: Groups of further workers that compress the same model, from the inside out. Together with ``group``
            they contain all workers. With HSDP, for example, these are the workers that hold the other shards.
        collectives: ``torch.distributed``, or a module with functions of the same names, such as ``deepspeed.comm``.
        node_group: Groups of the workers that share a node and its network card; see ``nodes.NodeGroup``.
        copies: Names of tensors of which workers of ``others`` have copies, which must stay equal.

    Attributes:
        inside: Collectives of the workers of this node. None without a hierarchy, and before ``form_nodes``.
        across: Collectives of the workers with this index on all nodes, or of all workers without a hierarchy.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        others: Sequence[dist.ProcessGroup] = (),
        collectives: Any = dist,
        node_group: NodeGroup = None,
        *,
        copies: frozenset[str] = frozenset(),
    ) -> None:
        ready = dist.is_initialized()
        # torch.distributed.new_group returns a number to workers that are not in the group.
        given: Any = group
        outside = isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER
        if not (given is None or outside or isinstance(given, dist.ProcessGroup)):
            raise TypeError(f"a group must be a torch.distributed.ProcessGroup or None; got {type(group).__name__}")
        if group is not None and not ready:
            raise RuntimeError(
                "a process group was given, but torch.distributed is not initialized; "
                "call torch.distributed.init_process_group first"
            )
        if ready and dist.get_rank(group) < 0:
            raise RuntimeError("this process is not a member of the given process group")
        # Refuses what cannot be one.
        given_groups(node_group)
        self.group, self.node_group, self._collectives = group, node_group, collectives
        self.others, self.copies = tuple(Communicator(other) for other in others), copies
        self.inside: Communicator | None = None
        self.across: Communicator = self
        # All workers, whose calls end the wait for a collective.
        self._everyone = (self, *self.others)
        # The default group in which nodes were formed. Other groups end with it.
        self._formed_in: Any = None

    @property
    def world_size(self) -> int:
        """Number of workers. Not cached: a program that lost a peer may set up a new default group."""
        # As torch's function would return, in a fiftieth of its time: this is asked several times a bucket.
        group = dist.group.WORLD if self.group is None else self.group
        return 1 if group is None else group.size()

    @property
    def index(self) -> int:
        return dist.get_rank(self.group) if self.world_size > 1 else 0

    @property
    def place(self) -> tuple[int, int]:
        """(index of this worker in the group, number of workers)."""
        return self.index, self.world_size

    @property
    def global_index(self) -> int:
        """Index of this worker among all workers."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def control(self) -> Control | None:
        """The group's control. All workers must call this at the same time if there is none yet."""
        return control_of(self.group, new=True) if self.world_size > 1 else None

    def _start(self, collective: Callable[..., dist.Work | None], tensor: Tensor, *args: Any, **options: Any) -> Work:
        """Start a collective, and count it. A host that waits for it hears of calls of other workers."""
        controls = list(filter(None, (control_of(each.group) for each in self._everyone)))
        for control in controls[:1]:
            if control.broken:
                raise RuntimeError(
                    "another worker's call interrupted an earlier step of this process group: make a new group"
                )
            control.started += 1
        work = collective(tensor, *args, async_op=True, **options)
        if work is None:
            return None
        watched = controls and uses_gloo(self.group, tensor.device)
        return functools.partial(wait_and_look, work, controls) if watched else work.wait

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start summing ``tensor`` over the workers in place. With one worker or no elements, send nothing."""
        if self.world_size == 1 or tensor.numel() == 0:
            return None
        return self._start(self._collectives.all_reduce, tensor, group=self.group)

    def form_nodes(self, device: torch.device) -> None:
        """Set ``inside`` and ``across`` for hierarchical sums. Collective. Call ``check_groups`` before.

        Warns a worker that is alone although it was started with others.
        """
        if self._collectives is dist and not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") != "1":
            started = f"one of WORLD_SIZE={os.environ['WORLD_SIZE']} workers"
            logger.warning("this worker, %s, averages alone: call torch.distributed.init_process_group first", started)
        if self.node_group is None or self.inside is not None or self.world_size == 1:
            return
        groups, self._formed_in = given_groups(self.node_group), dist.group.WORLD
        if groups is None:
            groups = make_groups(self.group, self.gather(own_place(), device), device)
        if groups is not None:
            self.inside, self.across = (Communicator(each, collectives=self._collectives) for each in groups)
            self.inside._everyone = self.across._everyone = self._everyone

    def lost_nodes(self) -> bool:
        """Return whether the groups of nodes ended with their default group. RuntimeError: a user has given them."""
        if self._formed_in is None or self._formed_in is dist.group.WORLD:
            return False
        if self.node_group != AUTO:
            raise RuntimeError("the groups given as node_group belong to an earlier default group: make a new state")
        self.inside, self.across, self._formed_in = None, self, None
        return True

    @property
    def share(self) -> tuple[int, int]:
        """(index of this worker in its node, workers of the node), or (0, 1) without a hierarchy."""
        return (0, 1) if self.inside is None else (self.inside.index, self.inside.world_size)

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Sequence[int] | None = None) -> Work:
        """Start sending row w of ``sent`` to worker w, and receiving row w of ``received`` from it. [workers, …].

        With ``sizes``, ``sent`` is flat and has a row of ``sizes[w]`` elements for each worker.
        """
        options: dict[str, Any] = {"group": self.group}
        if sizes is not None:
            options |= {"input_split_sizes": list(sizes), "output_split_sizes": [sizes[self.index]] * len(sizes)}
        return self._start(self._collectives.all_to_all_single, received, sent, **options)

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> Work:
        """Start collecting every worker's ``tensor`` in ``gathered`` [workers, …]. With one worker, copy it."""
        if self.world_size == 1:
            gathered.view(-1).copy_(tensor.view(-1))
            return None
        # torch 2.13 renamed all_gather_into_tensor and deprecated the old name.
        collectives = self._collectives
        gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_into_tensor
        return self._start(gather, gathered.view(-1), tensor.view(-1), group=self.group)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor with that of the first worker."""
        if self.world_size > 1 and tensor.numel():
            first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            wait(self._start(dist.broadcast, tensor, first, group=self.group))

    def minimum(self, tensor: Tensor) -> None:
        """Replace each element of a contiguous tensor by its minimum over the workers."""
        if self.world_size > 1:
            wait(self._start(dist.all_reduce, tensor.view(-1), dist.ReduceOp.MIN, self.group))

    def gather(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Return every worker's ``tensor`` on the CPU, as [workers, …]. The host may wait for ``travel_device``."""
        return self.start_gather(tensor, device)()

    def start_gather(self, tensor: Tensor, device: torch.device | None = None) -> Callable[[], Tensor]:
        """Start ``gather``. Return a function that waits for its result."""
        if self.world_size == 1:
            return lambda: tensor.unsqueeze(0)
        if self.control is not None:
            gather = self.control.start_gather(tensor.cpu())
            return lambda: torch.stack(gather())
        sent = tensor.to(travel_device(self.group, device))
        gathered = [torch.empty_like(sent) for _ in range(self.world_size)]
        work: dist.Work = dist.all_gather(gathered, sent, group=self.group, async_op=True)

        def finish() -> Tensor:
            wait(work.wait)
            return torch.stack(gathered).cpu()

        return finish

    def mean(self, tensor: Tensor) -> Tensor:
        """Average ``tensor`` over the workers in place and return it."""
        wait(self.all_reduce(tensor))
        return tensor.div_(self.world_size) if self.world_size > 1 else tensor


def travel_device(group: dist.ProcessGroup | None, device: torch.device | None = None) -> torch.device:
    """Return the first of the CPU, ``device`` and the current device for which a group has a backend."""
    # For example "cpu:gloo,cuda:gloo", or "cuda:nccl".
    types = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in types:
        return torch.device("cpu")
    if device is None or device.type not in types:
        return torch.device(types[0], torch.get_device_module(types[0]).current_device())
    return device


def wait(work: Work) -> None:
    """Wait for a collective: the host waits for gloo, the current stream for NCCL. Raise the collective's error."""
    try:
        if work is not None:
            work()
    except DisagreementError:
        raise
    except RuntimeError as error:
        reasons = "a worker was lost, raised an exception, or alone saved or loaded a state"
        raise type(error)(f"a sum over the workers failed, for example because {reasons} ({error})") from error
