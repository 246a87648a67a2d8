"""Errors of tensors without a matrix: of those that are sent whole, and of those that are no longer compressed."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from powersgd_triton.comm.exchange import flat
from powersgd_triton.core.saved_state import Parts
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.host import new_memory
from powersgd_triton.ops.reference import on_host
from powersgd_triton.ops.step import HostCopy, Step
from powersgd_triton.ranks.plan import RankPlan


@dataclasses.dataclass(eq=False)
class FlatErrors:
    """Errors of a bucket's tensors that are sent whole, flat in their layout's order.

    Attributes:
        E: The errors. None if nothing was left yet.
        M: What is compensated in a step, if a step has left it, or if it is noted.
        left: Whether a step has left M, the new errors, and it is not settled whether they count.
    """

    layout: Layout
    E: Tensor | None = None
    M: Tensor | None = None
    left: bool = False

    def named(self, flat: Tensor | None) -> Parts:
        """Return {name: view [n, m]} of E or M."""
        return {} if flat is None else {s.name: flat[s.span].view(s.rows, s.m) for s in self.layout.segments}


class WholeErrors:
    """Errors of one model's tensors without a matrix, by name. Buckets that send tensors whole have them flat.

    A step leaves what it has not sent. Its verdict decides in ``settle`` whether this or the error before it counts.

    Attributes:
        in_place: Whether M and the errors take the memory of the gradients, to which no average is written then.
        late: Whether the adapter calls ``settle``, since at the end of a step not all is known that decides about it.
        notes: Whether M is noted when it is made, of which a step leaves what it does not send.
        verdict: The verdict that is to decide about it. None if there is nothing to decide.
    """

    def __init__(self, plan: RankPlan) -> None:
        self._plan = plan
        self.late = self.in_place = self.notes = False
        self.forget()

    def forget(self) -> None:
        self.verdict: Tensor | None = None
        self._flat: list[FlatErrors] = []
        # Errors E [n, m] of other tensors. Which a step has added to gradients, and a copy of its verdict.
        self._remaining: Parts = {}
        self._added: set[str] = set()
        self._told: HostCopy | None = None

    @property
    def remain(self) -> bool:
        """Whether an error is still to be added to the gradient of a tensor that is not sent whole."""
        return bool(self._remaining)

    def has_errors(self) -> bool:
        return any(held.E is not None for held in self._flat) or bool(self._unsent())

    def noted(self) -> list[tuple[FlatErrors, Tensor]]:
        """Return the errors of buckets with their M, where one is noted or left, until ``settle``."""
        return [(held, held.M) for held in self._flat if held.M is not None]

    def hold(self, errors: Parts) -> None:
        """Hold {name: E} until they are added to the next gradients of these tensors."""
        self._remaining = self._unsent() | errors

    def take(self, name: str) -> Tensor | None:
        """Return the remaining error of a tensor that is compressed now, and no longer hold it."""
        unsent = self._unsent()
        # Whether a step has sent it is not known yet.
        return None if name in self._added else unsent.pop(name, None)

    def compensated(self, layout: Layout, gradients: Mapping[str, Tensor], step: Step) -> Tensor:
        """Return M = G + E of tensors that are sent whole, flat, in fp32."""
        if not self._plan.config.error_feedback:
            return flat(layout, gradients).to(torch.float32, copy=True)
        M, terms = self.terms(layout, gradients, step)
        return M if terms is None else torch.add(*terms, out=M)

    def terms(
        self, layout: Layout, gradients: Mapping[str, Tensor], step: Step
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return memory for M of tensors that are sent whole, flat, and G and E, of which it is the sum.

        None if the memory has M already.
        """
        G, terms = flat(layout, gradients), None
        if self.in_place and not self.has_errors():
            M = G.float()
        else:
            E, scale = self._held(layout, G.device), step.scale(G.device)
            E = E if scale is None else E * scale
            if self.in_place:
                M = G.float().add_(E)
            else:
                M, terms = new_memory(len(E), E.dtype, E.device), (G, E)
        if self.notes:
            self._of(layout).M = M
        return M, terms

    def keep(self, layout: Layout, M: Tensor, step: Step) -> None:
        """Take over what a step has left of M as the errors, unless it turns out not to be applied."""
        if not self._plan.config.error_feedback:
            return
        self.verdict, scale = step.verdict(M.device), step.scale(M.device)
        held = self._of(layout)
        held.M, held.left = M if scale is None else M.div_(scale), True

    def add_remaining(self, layout: Layout, gradients: Mapping[str, Tensor], step: Step) -> Mapping[str, Tensor]:
        """Add remaining errors to the gradients of tensors that are no longer compressed, in fp32 or fp64 copies.

        Without remaining errors, return the gradients themselves. If the step turns out not to be finite, the errors
        are added again in the next step.
        """
        waiting = self._apart(layout).keys() - self._added
        names = [s.name for s in layout.segments if not s.rank and s.name in waiting] if waiting else []
        if not names:
            return gradients
        device = gradients[names[0]].device
        scale = step.scale(device)
        # Copy all gradients of the bucket, so that they keep one dtype.
        sums = {name: g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in gradients.items()}
        for name in names:
            error = self._remaining[name]
            sums[name] = sums[name] + (error if scale is None else error * scale).view(sums[name].shape)
        self._added |= {*names}
        self.verdict = step.verdict(device)
        return sums

    def settle(self, step: Step) -> None:
        """Keep what the last step has left, or what was before it if it is not applied, if that is decided.

        The host does not wait for a device.
        """
        verdict = self.verdict
        if verdict is None or step.undecided or not self.is_unsettled(step):
            return
        for held, M in self.noted():
            if held.left and not on_host(verdict):
                E = self._held(held.layout, M.device)
                torch.where(verdict.bool(), M, E, out=E)
            elif held.left and verdict:
                held.E = M
            held.M, held.left = None, False
        self._flat = [held for held in self._flat if held.E is not None]
        self.verdict = None
        if self._added and self._told is None:
            # Whether any error is left decides what the host does. Replays of a captured step overwrite the verdict.
            self._told = HostCopy(verdict.clone())

    def is_unsettled(self, step: Step) -> bool:
        """Return whether a step has ended that ``settle`` would decide about."""
        return self.verdict is not None and not step.decides(self.verdict)

    def take_back(self, unsent: Mapping[str, Tensor]) -> None:
        """Let tensors keep the errors from before the last step where the scalar ``unsent[name]`` is True."""
        for held, M in self.noted():
            before, after = held.named(self._held(held.layout, M.device)), held.named(M)
            for name in after.keys() & unsent.keys() if held.left else ():
                after[name].copy_(torch.where(unsent[name].to(M.device), before[name], after[name]))
        for name in self._added & unsent.keys() if self.verdict is not None else ():
            error = self._remaining[name]
            self._remaining[name] = error.where(unsent[name].to(error.device) | (self.verdict == 0), 0.0)
            self._added.discard(name)

    def errors(self, step: Step) -> Parts:
        """Return all errors of tensors without a matrix. They are views, unless the last step is still undecided."""
        if not self.late:
            self.settle(step)
        verdict, found = self.verdict if self.is_unsettled(step) else None, dict(self._unsent())
        # What ``settle`` would leave, which may still change.
        if verdict is not None:
            found |= {name: found[name].where(verdict.eq(0), 0.0) for name in self._added}
        for held in self._flat:
            E = held.E
            if verdict is not None and held.left and held.M is not None:
                E = held.M.where(verdict.bool(), torch.zeros(()) if E is None else E)
            found |= held.named(E)
        return found

    def _of(self, layout: Layout) -> FlatErrors:
        # Buckets are few, and the hash of a layout would read all of its segments.
        for held in self._flat:
            if held.layout == layout:
                return held
        self._flat.append(FlatErrors(layout))
        return self._flat[-1]

    def _held(self, layout: Layout, device: torch.device) -> Tensor:
        """Return the errors of tensors that are sent whole. At first, they come from other layouts, or are zero."""
        held = self._of(layout)
        if held.E is None:
            E, remaining = torch.zeros(layout.numel, dtype=torch.float32, device=device), self._apart(layout)
            for segment in layout.segments:
                if segment.name in remaining:
                    E[segment.span] = remaining.pop(segment.name).reshape(-1)
            held.E = E
        return held.E

    def _apart(self, layout: Layout) -> Parts:
        """Return the remaining errors by name, with those that other layouts share with this one."""
        for held in self._flat:
            if not held.layout.shapes.keys().isdisjoint(layout.shapes):
                # Copies, since views would keep the memory of all until the last one is used. It may not suffice.
                copies = {name: E.clone() for name, E in held.named(held.E).items()}
                held.E = None
                self._remaining |= copies
        return self._unsent()

    def _unsent(self) -> Parts:
        """Return the remaining errors, without those that an applied step has added to gradients."""
        if self._told is not None:
            for name in self._added if self._told.numbers() else ():
                del self._remaining[name]
            self._added, self._told = set(), None
        return self._remaining
