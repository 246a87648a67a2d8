"""The stages of a step in Triton kernels: at most 13 launches up to rank 32, for any number of matrices."""

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.kernels.availability import MAX_RANK
from powersgd_triton.kernels.backproject import backproject_triton, compensate_backproject_triton
from powersgd_triton.kernels.commit import commit_triton
from powersgd_triton.kernels.compensate_project import Pending, compensate_project_triton
from powersgd_triton.kernels.configurations import architecture, select_configuration
from powersgd_triton.kernels.explore import explore_numel, explore_triton
from powersgd_triton.kernels.launcher import Launches
from powersgd_triton.kernels.orthogonalize import grams_numel, orthogonalize_triton
from powersgd_triton.kernels.pack import pack_triton
from powersgd_triton.kernels.reconstruct import reconstruct_triton
from powersgd_triton.kernels.table import BucketTable, FactorTable, Matrix, Pointers
from powersgd_triton.kernels.wire import TritonWire
from powersgd_triton.layout.layout import ShapeGroup
from powersgd_triton.layout.matrices import products
from powersgd_triton.layout.wire_format import WirePlan
from powersgd_triton.ops.backend import Message, Ranges, Workspace
from powersgd_triton.ops.bucket import Bucket, keys
from powersgd_triton.ops.explore import explores
from powersgd_triton.ops.step import Step
from powersgd_triton.ops.torch_backend import TorchBackend
from powersgd_triton.ops.wire import Wire


class TritonBackend:
    """The stages of ``ops.backend.Backend`` on one bucket, one repetition a step.

    ``TorchBackend`` handles rare cases. It works on the same memory with the same result.
    """

    def __init__(self, bucket: Bucket, workspace: Workspace) -> None:
        layout, device = bucket.layout, bucket.message_P.device
        self.bucket, self._workspace, self._device = bucket, workspace, device
        self._alternating = bucket.config.algorithm == "alternating"
        rank = self._rank = largest_rank(bucket)
        launches = self._launches = select_configuration(architecture(device), rank)
        self._tiles = launches.reconstruct.tile, launches.backproject.tile
        sizes = [segment.numel for segment in layout.bypass]
        offsets = layout.bypass_offsets(layout.p_numel), layout.bypass_offsets(layout.q_numel)
        bypass = list(zip(sizes, *offsets, strict=True))

        def table(groups: Sequence[ShapeGroup]) -> tuple[BucketTable, list[str]]:
            matrices = [
                Matrix(group.n, group.m, group.rank, group.p_offset + i * group.n * group.rank,
                       group.q_offset + i * group.m * group.rank, key)
                for group in groups
                for i, key in enumerate(key for segment in group.segments for key in keys(segment, bucket.config))
            ]  # fmt: skip
            segments = [segment for group in groups for segment in group.segments]
            counts, names = [s.batch for s in segments], [s.name for s in (*segments, *layout.bypass)]
            return BucketTable(matrices, bypass, *self._tiles, device, counts), names

        # The whole matrices, and the rows that this worker multiplies.
        self._table, self._names = self._own, self._own_names = table(layout.groups)
        if bucket.shared:
            self._own, self._own_names = table(bucket.own)
        bucket.zeroed += [self._table.P.zeroed, self._table.Q.zeroed]
        self._finite = torch.ones((), dtype=torch.int32, device=device)
        # Kernels always take tensors. These scalars stand for no pending product and no rescaling, and ``_ignored``
        # takes a verdict that nobody reads.
        self._never, self._ignored = torch.zeros(2, dtype=torch.int64, device=device).unbind()
        self._same = torch.ones((), dtype=torch.float32, device=device)
        # Sums of the factors Q, P in the messages.
        self._means = bucket.message_Q[: layout.q_numel], bucket.message_P[: layout.p_numel]
        self._M: Pointers | None = None
        if bucket.M:
            errors = [bucket.buffers[piece.name] for group in bucket.own for piece in group.segments]
            M = self._own.pointers(errors, bypass=False)
            # Another object than that of gradients which lie in the same way; see ``Launches``.
            self._M = M._replace(distances=M.distances.view(1, -1))
        self._stages: dict[str, Launches] = collections.defaultdict(Launches)
        # Parts of averages that were written last, {name: (first element, elements)}, their table, and their pieces.
        self._ranges: tuple[dict[str, tuple[int, int]], BucketTable, dict[str, list[int]]] | None = None
        # Where gradients and error buffers are in this step. Numbers, which keep no tensor alive.
        self._places: tuple[Pointers, Pointers | None]

    def project(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:  # noqa: ARG002
        message = Message(self.bucket.message_P, left=True, own=self.bucket.P if self._alternating else None)
        self._compensate(message, gradients, step)
        return message

    def backproject(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> Message:  # noqa: ARG002
        bucket, table = self.bucket, self._own
        message = Message(bucket.message_Q, left=False, own=bucket.Q)
        if self._alternating:
            self._compensate(message, gradients, step)
            return message
        self._clear(message)
        G, M = self._places
        number = step.number(self._device)

        def launch() -> None:
            parts = self._get("parts", table.q_parts_numel)
            self._orthogonalize(self._table.P, bucket.message_P, number, out=bucket.P_hat)
            backproject_triton(table, G if M is None else M, bucket.P_hat, self._launches.backproject, out=parts)
            # The same launch turns the bypass tensors of the previous message into means.
            pack_triton(
                table.pack_Q, parts, G, self._finite, own=bucket.Q, message=bucket.message_Q,
                bypass=bucket.message_P, workers=step.workers,
            )  # fmt: skip

        self._repeat("backproject", launch, (step.workers,), number)
        return message

    def commit(self, gradients: Mapping[str, Tensor], step: Step, repetition: int) -> None:  # noqa: ARG002
        bucket, table, layout, config = self.bucket, self._table, self.bucket.layout, self.bucket.config
        projected = self._alternating and not products(config, step.iteration, 0)[1]
        mean = self._means[projected]
        if projected:
            message, factors, basis = bucket.message_P, table.P, bucket.P_hat
            product, average = (bucket.P, bucket.basis), (mean, bucket.basis)
        else:
            message, factors, basis = bucket.message_Q, table.Q, bucket.basis
            product, average = (bucket.P_hat, bucket.Q), (bucket.P_hat, mean)
        number, verdict = step.number(self._device), step.verdict(self._device)

        def launch() -> None:
            if self._alternating:
                bypass = (table.pack_P if projected else table.pack_left)[: table.bypass_programs]
                G, workers = self._places[0], step.workers
                pack_triton(bypass, message, G, self._finite, own=None, message=message, workers=workers)
            # This is needed without warm start too, because it detects non-finite values.
            following = self._get("following", len(mean))
            self._orthogonalize(factors, mean, number, out=following)
            if explores(config, repetition):
                parts, every = self._get("parts", explore_numel(table, self._rank)), config.explore_every
                explore_triton(table, number, self._finite, self._rank, every, parts=parts, out=following)
            commit_triton(
                self._own, *self._places, following if config.warm_start else None, step.workers, self._finite,
                basis=basis, message=mean, verdict=verdict,
            )  # fmt: skip

        self._repeat(f"commit {projected=}", launch, (step.workers,), number, verdict)
        bypass_means = message[len(mean) :] if self._alternating else bucket.message_P[layout.p_numel :]
        bucket.commit([product], [average], bypass_means, verdict)

    def reconstruct(self, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        if _one_dtype(out.values()):
            self._reconstruct(self._table, [out[name] for name in self._names], overflow)
        else:
            TorchBackend(self.bucket).reconstruct(out, overflow)

    def reconstruct_ranges(self, out: Ranges, overflow: Tensor | None) -> None:
        places = {name: (start, target.numel()) for name, (start, target) in out.items() if target.numel()}
        if not _one_dtype(out[name][1] for name in places):
            TorchBackend(self.bucket).reconstruct_ranges(out, overflow)
            return
        if self._ranges is None or self._ranges[0] != places:
            self._ranges = (places, *self._table_of(places))
        _, table, sizes = self._ranges
        pieces = [piece for name, numels in sizes.items() for piece in out[name][1].split(numels)]
        self._reconstruct(table, pieces, overflow)

    def _table_of(self, places: Mapping[str, tuple[int, int]]) -> tuple[BucketTable, dict[str, list[int]]]:
        """Return the table of parts of the averages, and {name: elements of each of its matrices}, in their order."""
        whole, matrices, bypass, sizes = self._table, [], [], dict[str, list[int]]()
        waiting = iter(whole.matrices)
        for name, count in zip(self._names, whole.counts, strict=False):
            start, numel = places.get(name, (0, 0))
            for matrix in itertools.islice(waiting, count):
                each = matrix.n * matrix.m
                if max(0, start) < min(each, start + numel):
                    within = matrix.within(max(0, start), min(each, start + numel))
                    sizes.setdefault(name, []).extend(part.n * part.m for part in within)
                    matrices += within
                # From the next matrix on.
                start -= each
        for name, (_, of_P, of_Q) in zip(self._names[len(whole.counts) :], whole.bypass, strict=True):
            if name in places:
                start, numel = places[name]
                sizes[name] = [numel]
                bypass.append((numel, of_P + start, of_Q + start))
        return BucketTable(matrices, bypass, *self._tiles, self._device), sizes

    def _reconstruct(self, table: BucketTable, out: Sequence[Tensor], overflow: Tensor | None) -> None:
        bucket = self.bucket
        # The means of the bypass tensors lie at the end of the message that carried them.
        behind_P = bucket.bypass_means.untyped_storage().data_ptr() == bucket.message_P.untyped_storage().data_ptr()
        carried = (bucket.message_P, table.pack_P) if behind_P else (bucket.message_Q, table.pack_left)
        verdict = self._ignored if overflow is None else overflow
        P, Q = bucket.average[0]
        pointers = table.pointers(out)

        def launch() -> None:
            reconstruct_triton(table, P, Q, *carried, self._launches.reconstruct, out=pointers, verdict=verdict)

        if table is self._table:
            self._repeat(f"reconstruct {behind_P=}", launch, (P, Q), verdict, places=[pointers])
        else:
            launch()

    def orthogonalize_bases(self, step: Step, *, redraw: bool = False) -> None:
        left, right = (self._table.P, self.bucket.P_hat), (self._table.Q, self.bucket.basis)
        for factors, basis in [left, right] if self._alternating else [right]:
            if redraw:
                # Orthogonalization replaces a zero column by a random direction.
                basis.zero_()
            self._orthogonalize(factors, basis, step.number(self._device), out=basis)

    def wire(self, plan: WirePlan) -> Wire:
        assert self.bucket.message_P.dtype == torch.float32, "the kernels are not chosen for fp64 gradients"
        return TritonWire(plan, self._launches.wire, self._rank, self._device)

    def _compensate(self, message: Message, gradients: Mapping[str, Tensor], step: Step) -> None:
        """Compute the first product of a step, M Q or Mᵀ P̂, and pack it and the bypass tensors into its message."""
        bucket, table, launches = self.bucket, self._own, self._launches
        self._clear(message)
        # First, since it fails if the kernels do not take the gradients.
        self._places = G, M = self._own.pointers([gradients[name] for name in self._own_names]), self._M
        growth = bucket.rescale(step)
        growth = self._same if growth is None else growth
        pending: Pending = (bucket.P_hat, bucket.Q, self._never)
        if bucket.applied is not None:
            pending = (*bucket.product[0], bucket.applied)

        def launch() -> None:
            operands = table, G, M, pending, growth
            if message.left:
                entries, parts = table.pack_P, self._get("parts", table.p_parts_numel)
                compensate_project_triton(*operands, bucket.basis, launches.compensate_project, out=parts)
            else:
                entries, parts = table.pack_left, self._get("parts", table.q_parts_numel)
                kernels = launches.compensate_backproject, launches.backproject
                compensate_backproject_triton(*operands, bucket.P_hat, *kernels, out=parts)
            pack_triton(entries, parts, G, self._finite, own=message.own, message=message.content)

        self._repeat(f"compensate {message.left=}", launch, pending[:2], pending[2], growth)
        bucket.applied = None

    def _repeat(
        self, stage: str, launch: Callable[[], None], fixed: tuple[Any, ...], *moving: Tensor, places: Any = None
    ) -> None:
        """Launch a stage's kernels. See ``Launches.run``; tensors among what is ``fixed`` are compared by identity.

        ``places`` are those of the tensors that kernels reach through addresses, by default of G and M.
        """
        places = [each for each in places or self._places if each is not None]
        same = [id(value) if isinstance(value, Tensor) else value for value in fixed]
        addresses = [value for each in places for value in each[1:]]
        self._stages[stage].run(launch, (places[0].dtype, self._workspace.version, *same), [*addresses, *moving])

    def _orthogonalize(self, factors: FactorTable, A: Tensor, number: Tensor, *, out: Tensor) -> None:
        launch, rank = self._launches.orthogonalize, self._table.rank
        X = self._get("X", A.numel() if rank > launch.panel else 1, torch.float64)
        grams = self._get("grams", grams_numel(factors, rank, launch.panel), torch.float64)
        orthogonalize_triton(
            factors, A, rank, number, self.bucket.config.orthogonalization_epsilon,
            self._launches.gram, launch, X=X, grams=grams, finite=self._finite, out=out,
        )  # fmt: skip

    def _clear(self, message: Message) -> None:
        """Set a message and its factors to zero if other workers of this node multiply some of their rows."""
        if self.bucket.shared:
            message.content.zero_()
            if message.own is not None:
                message.own.zero_()

    def _get(self, name: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return at least ``numel`` elements of scratch memory. The same name gives the same memory."""
        return self._workspace.get(name, numel, dtype, self._device)


def _one_dtype(tensors: Iterable[Tensor]) -> bool:
    """Return whether a kernel can write these tensors: it writes one dtype of at most 32 bits."""
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) <= 1 and torch.float64 not in dtypes


def largest_rank(bucket: Bucket) -> int:
    """Return the largest rank in the model's buckets, also in later plans: kernels for it serve all of them."""
    config = bucket.config
    bound = config.max_rank if config.planned else config.rank
    ranks = [group.rank for group in bucket.layout.groups]
    return min(MAX_RANK, max([bound if isinstance(bound, int) else 1, *ranks]))
