"""What must hold in every step of a random run."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from powersgd_triton import PowerSGDConfig
from powersgd_triton.layout.constants import DEAD_COLUMN
from powersgd_triton.layout.layout import Segment
from powersgd_triton.layout.matrices import products
from powersgd_triton.ops.bucket import keys
from powersgd_triton.ops.explore import explores
from powersgd_triton.ops.reference import largest_error
from tests.support.fuzz_cases import Case, gradients
from tests.support.held import TINY, check_memory, check_read, fits, follow, gamma, mean_in_range, owed, pair, total
from tests.support.lockstep import BucketRun, Fleet, Values, assert_same_bits
from tests.support.orthonormal import ORTHONORMAL, departure


class Follower:
    """Runs a case and compares every step with the method, started from what the workers themselves held before."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.config = PowerSGDConfig(**case.fields)
        self.fleet = Fleet(self.config, case.shapes, case.workers, case.node_sizes[0])
        self.buckets: list[list[str]] = []
        # Of the last step: what the next must start from.
        self.following: dict[str, Tensor] = {}

    def run(self) -> None:
        for step in range(self.case.steps):
            self.step(step)

    def load(self, step: int) -> None:
        """Save the state after a step, and go on from it in nodes of the next size. What all owe stays the same."""
        before = self.owed_by_all()
        saved = self.fleet.save()
        sizes = self.case.node_sizes
        self.fleet = Fleet(
            self.config,
            self.case.shapes,
            self.case.workers,
            sizes[sum(save <= step for save in self.case.saves) % len(sizes)],
        )
        self.fleet.load(saved)
        for name, (exact, size) in before.items():
            compute = torch.float64 if self.case.dtypes[name] == torch.float64 else torch.float32
            tolerance = (gamma(len(saved) + 8, torch.float32) + self.stored_error(compute)) * size + 8 * TINY
            assert ((self.owed_by_all()[name][0] - exact).abs() <= tolerance).all(), f"{name}: a saved state lost some"

    def owed_by_all(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums over the workers of what ``owed`` finds, of all matrices."""
        found = {s.name: [owed(engine, s) for engine in self.fleet.engines] for s in self.segments()}
        return {name: (total([E for E, _ in own]), total([size for _, size in own])) for name, own in found.items()}

    def segments(self) -> list[Segment]:
        """The matrices of all buckets that have errors."""
        layouts = [self.fleet.layout(tuple(names), True) for names in self.buckets]
        return [segment for layout in layouts for segment in layout.compressed if self.config.error_feedback]

    def by_node(self, each: Sequence[Tensor]) -> list[Tensor]:
        """The sums over the workers of each node."""
        size = self.fleet.node_size
        return [total(each[first : first + size]) for first in range(0, len(each), size)]

    def step(self, number: int) -> None:
        case, engines = self.case, self.fleet.engines
        given = gradients(case, number)
        count = case.buckets[min(number, len(case.buckets) - 1)]
        names = list(case.shapes)
        self.buckets = [part for i in range(count) if (part := names[i::count])]
        layouts = [self.fleet.layout(tuple(part), number >= self.config.start_iter) for part in self.buckets]
        before = {
            segment.name: [owed(engine, segment) for engine in engines]
            for layout in layouts
            for segment in layout.compressed
            if self.config.error_feedback
        }
        runs = self.fleet.step(given, self.buckets, case.overlapping)
        finite = [self.check_outputs(run, given, before) for run in runs]
        applied = all(finite) and all(fits(run) for run in runs)
        for run in runs:
            assert all(bool(verdict) == applied for verdict in run.verdicts), "the verdict is not what was written"
        for run, counts in zip(runs, finite, strict=True):
            for segment in run.layout.compressed:
                self.check_bases(run, segment, counts)
                for index in range(segment.batch):
                    self.check_matrix(run, segment, index, given, before.get(segment.name), counts, applied)
        check_memory(engines)
        for engine in engines if number in case.reads else ():
            check_read(engine, self.segments())
        if number in case.saves and mean_in_range(engines):
            self.load(number)
            self.following = {} if self.config.error_feedback else self.following

    def check_outputs(
        self, run: BucketRun, given: list[Values], before: dict[str, list[tuple[Tensor, Tensor]]]
    ) -> bool:
        """Equal bits everywhere, means of what is not compressed; whether the bucket was finite."""
        layout = run.layout
        names = [segment.name for segment in layout.segments]
        for averages, written in zip(run.averages, run.written, strict=True):
            assert_same_bits([averages[n] for n in names], [run.averages[0][n] for n in names])
            assert_same_bits([written[n] for n in names], [run.written[0][n] for n in names])
        averages = run.averages[0]
        finite = bool(run.backend._finite)  # type: ignore[attr-defined]
        for segment in layout.bypass:
            assert not finite or averages[segment.name].isfinite().all(), segment
        received = all(own[name].isfinite().all() for own in given for name in names)
        if not received:
            assert not finite, "a gradient that is not finite did not reach the output"
        elif not finite:
            # Neither a product with orthonormal columns nor a sum over workers is larger than these norms.
            largest = max(
                sum(float(own[name].double().norm()) for own in given)
                + sum(float(size.norm()) for _, size in before.get(name, []))
                for name in names
            )
            limit = float(torch.finfo(averages[names[0]].dtype).max)
            assert largest >= limit / 64, f"gradients and errors of norm {largest} were called not finite"
        for segment in layout.bypass:
            self.check_mean(segment, averages[segment.name], [own[segment.name] for own in given])
        if not finite:
            for segment in layout.compressed:
                assert averages[segment.name].isnan().all(), f"{segment}: a bucket that is not finite must say so"
        for segment in layout.segments:
            self.check_written(run, segment)
        return finite

    def check_mean(self, segment: Segment, mean: Tensor, given: list[Tensor]) -> None:
        exact = total([G.double() for G in given])
        size = total([G.double().abs() for G in given])
        limit = torch.finfo(mean.dtype).max
        sure = size < limit / 2
        tolerance = gamma(self.case.workers + 1, mean.dtype) * size + TINY
        error = (mean.double() * self.case.workers - exact).abs()
        assert (error <= tolerance)[sure].all(), f"{segment}: mean is off by {error.max()}"
        assert not mean[~exact.isfinite()].isfinite().any(), segment

    def check_written(self, run: BucketRun, segment: Segment) -> None:
        """What is written over the gradients is the average, rounded to their dtype."""
        average, written = run.averages[0][segment.name], run.written[0][segment.name].double()
        rounding = torch.finfo(self.case.dtypes[segment.name]).eps * average.double().abs()
        if segment.rank:
            # The product may be summed in another order there.
            pairs = [pair(run.backend.bucket, *factors, segment) for factors in run.backend.bucket.average]
            L, R = (torch.cat(factors, dim=2).abs() for factors in zip(*pairs, strict=True))
            rounding += (gamma(2 * L.shape[2] + 2, average.dtype) * (L @ R.mT)).view_as(rounding)
        error = (written - average.double()).abs()
        smallest = torch.finfo(self.case.dtypes[segment.name]).smallest_normal
        overflowed = average.double().abs() + rounding >= torch.finfo(self.case.dtypes[segment.name]).max
        assert ((error <= rounding + smallest) | overflowed | ~average.isfinite()).all(), segment
        assert not written[average.isnan()].isfinite().any(), segment

    def views(self, run: BucketRun, segment: Segment, at: int) -> tuple[Tensor, Tensor]:
        return pair(run.backend.bucket, *run.bases[at], segment)

    def check_bases(self, run: BucketRun, segment: Segment, finite: bool) -> None:
        """Orthonormal; carried over from the last step, and left alone in a step that is not finite."""
        left, right = self.views(run, segment, 0)
        alternating = self.config.algorithm == "alternating"
        start = torch.cat([left, right] if alternating else [right], dim=1)
        # A new plan drops columns, or adds some.
        if self.config.warm_start and segment.name in self.following and not self.config.planned:
            # A bucket without fp64 gradients rounds those of one with some.
            expected = self.following[segment.name].to(run.bases[0][0].dtype).double()
            assert torch.equal(start, expected), f"{segment}: another basis than was left"
        left, right = self.views(run, segment, -1)
        for basis in [left, right] if alternating or finite else [right]:
            assert departure(basis) <= ORTHONORMAL, segment
        end = torch.cat([left, right] if alternating else [right], dim=1)
        if not finite and self.config.iterations == 1 and self.config.warm_start:
            assert torch.equal(start, end), f"{segment}: a step that is not finite moved its basis"
        self.following[segment.name] = end

    def check_matrix(
        self,
        run: BucketRun,
        segment: Segment,
        index: int,
        given: list[Values],
        before: list[tuple[Tensor, Tensor]] | None,
        finite: bool,
        applied: bool,
    ) -> None:
        # A node compresses the sum of its workers' gradients.
        def own_matrix(tensor: Tensor) -> Tensor:
            return tensor.double().view(segment.batch, segment.n, segment.m)[index]

        G = self.by_node([own_matrix(own[segment.name]) for own in given])
        zeros = torch.zeros_like(G[0])
        known = [(own_matrix(error), own_matrix(size)) for error, size in before] if before else []
        E, sizes = map(self.by_node, zip(*(known or [(zeros, zeros)] * len(given)), strict=True))
        compute = run.averages[0][segment.name].dtype
        stored = self.stored_error(compute)
        k = segment.n + segment.m + 4 * segment.rank * self.config.iterations + self.case.workers + 8
        # A matrix may have come from a bucket of narrower gradients, and its error be written down in its dtype there.
        mixed = len(set(self.case.dtypes.values())) > 1
        share = gamma(k, torch.float32 if mixed else compute) + stored
        if not finite:
            if before is not None:
                now = self.by_node([own_matrix(owed(engine, segment)[0]) for engine in self.fleet.engines])
                self.check_kept(segment, now, G, list(E), list(sizes), share)
            return
        assert all(own.isfinite().all() for own in G)
        left, right = (factors[index] for factors in self.views(run, segment, 0))
        iteration = self.fleet.engines[0].step.iteration - 1
        turns = [products(self.config, iteration, repetition) for repetition in range(self.config.iterations)]
        chosen = iter(range(1, len(run.bases)))
        drop = max(self.config.orthogonalization_epsilon, DEAD_COLUMN)

        def chosen_basis(side: int, A: Tensor, size: Tensor) -> Tensor:
            """The basis that the run chose, which must span A."""
            at = next(chosen)
            basis = self.views(run, segment, at)[side][index]
            if at == len(run.bases) - 1 and not self.config.warm_start:
                return basis
            assert departure(basis.unsqueeze(0)) <= ORTHONORMAL, f"{segment}: basis {at} is not orthonormal"
            outside = (A - basis @ (basis.T @ A)).norm(dim=0)
            if at == 2 and self.explores(segment, index):
                # Another direction takes the place of the last one.
                outside[-1] = 0
            rounding = 2 * torch.finfo(compute).eps * math.sqrt(segment.rank)
            # What was projected was off by its rounding, and its share that counts as nothing is left out.
            allowed = (2 * drop + rounding) * A.norm(dim=0) + share * size.norm(dim=0) + k * TINY
            assert (outside <= allowed).all(), f"{segment}: basis {at} misses {outside} where {allowed} is allowed"
            return basis

        average, rests, sizes = follow(G, E, sizes, (left, right), turns, chosen_basis)
        tolerance = share * total(sizes) + k * TINY
        # A projection on orthonormal columns enlarges nothing.
        whole = own_matrix(run.averages[0][segment.name])
        sent = whole.norm() * len(given)
        largest = (1 + ORTHONORMAL) * (total(G) + total(E)).norm() + tolerance.norm()
        assert sent <= largest or not sent.isfinite(), f"{segment}: {sent} of {largest} was sent"
        average *= len(G) / len(given)
        error = (whole - average).abs() * len(given)
        # Finite factors may have a product that is out of range.
        representable = average.abs() + tolerance < torch.finfo(compute).max
        assert (error <= tolerance)[representable].all(), (
            f"{segment}: average is off by {(error / tolerance).max()} of the tolerance"
        )
        if before is None:
            return
        after = self.by_node([own_matrix(owed(engine, segment)[0]) for engine in self.fleet.engines])
        for found, left_over, size, own, E_before in zip(after, rests, sizes, G, E, strict=True):
            expected = left_over if applied else own + E_before
            error = (found - expected).abs()
            tolerance = share * size + k * TINY
            assert (error <= tolerance).all(), (
                f"{segment}: error is off by {(error / tolerance).max()} (applied {applied})"
            )

    def stored_error(self, compute: torch.dtype) -> float:
        """Relative error of what is written to the error buffer; Triton's interpreter cuts off instead of rounding."""
        own = self.config.error_dtype if self.config.error_feedback else None
        return 2 * torch.finfo(compute if own is None else getattr(torch, str(own))).eps

    def explores(self, segment: Segment, index: int) -> bool:
        """Return whether the first right basis of the last step may look in another direction."""
        iteration = self.fleet.engines[0].step.iteration - 1
        return (
            explores(self.config, repetition=0)
            and segment.rank < min(segment.n, segment.m)
            and (keys(segment, self.config)[index] + iteration) % self.config.explore_every == 0
        )

    def check_kept(
        self, segment: Segment, now: list[Tensor], G: list[Tensor], E: list[Tensor], sizes: list[Tensor], share: float
    ) -> None:
        """Where the bucket was not finite, E is what it was but for the rounding of M and of E itself."""
        held = [engine.residuals.matrices[segment.name].error for engine in self.fleet.engines]
        dtype = next(error.dtype for error in held if error is not None)
        limit = torch.finfo(dtype).max
        for after, own, before, size in zip(now, G, E, sizes, strict=True):
            added = torch.where(own.isfinite(), own, 0)
            tolerance = share * (size + added.abs()) + 8 * TINY
            # What overflowed cannot be given back; all the same it must not stay.
            lost = size + added.abs() + tolerance >= limit
            # An error is clamped, so that products of later steps do not overflow: by the widest dtype of its batch.
            wide = torch.promote_types(dtype, torch.float32)
            limits = {largest_error(torch.promote_types(wide, each)) for each in self.case.dtypes.values()}
            clamped = torch.stack([before.clamp(-largest, largest) for largest in limits])
            kept = ((after - clamped).abs() <= tolerance).any(dim=0) | (lost & after.isfinite())
            assert kept.all(), f"{segment}: error became {after[~kept]} from {before[~kept]}"
