"""Steps that are captured in a CUDA graph and replayed."""

from collections.abc import Iterable

from torch import Tensor

from powersgd_triton.core.residuals import Residuals
from powersgd_triton.core.scheme import Listener
from powersgd_triton.ops.bucket import Bucket, Product
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan

BeforeCapture = dict[Bucket, tuple[Tensor | None, Product]]
"""What buckets were still to subtract, and whether it was applied, before a captured step."""


def check_capture(plan: RankPlan, step: Step, listeners: Iterable[Listener], *, settled: bool) -> None:
    """Raise RuntimeError if replays of a step would not do what further steps do, or if those need the host.

    ``settled`` says whether all steps of the bucket do the same from now on.
    """
    config = plan.config
    own = (
        (config.algorithm == "alternating", "the alternating algorithm does something else in every second step"),
        (config.whole_format, "the host chooses the random numbers of quantized tensors; give a rank alone"),
        (config.planned and config.replan_every, "the host plans ranks; set replan_every=0"),
        (plan.exact, "compression='auto' chose an all-reduce; capture DDP's own"),
        (config.check_every, "the host compares workers; set check_every=0"),
        (step.loss_scale is not None, "the error follows a loss scale"),
        (step.iteration < config.start_iter, f"the first {config.start_iter} steps are exact"),
        (not settled, "its gradients must be compressed in the same bucket in the step before it"),
    )
    others = (listener.obstacle() for listener in listeners)
    if found := [*filter(None, others), *(why for holds, why in own if holds)]:
        raise RuntimeError(f"this step cannot be captured in a CUDA graph: {found[0]}")


def start(residuals: Residuals, step: Step, *, captured: bool) -> BeforeCapture:
    """Start a step so that it can be replayed. If it is ``captured``, return what was pending before it."""
    before: BeforeCapture = {b: (b.applied, b.product) for b in residuals.buckets()} if captured else {}
    with residuals.streams.everywhere():
        # If the adapter has not told that the last step's verdict was final.
        step.undecided = False
        residuals.whole.settle(step)
        renewed = step.start(captured=captured)
    if renewed is not None:
        # The step overwrites the verdict of the last one.
        verdict, copy = renewed
        for bucket in residuals.buckets():
            if bucket.applied is verdict:
                bucket.applied = copy
    return before


def restore(before: BeforeCapture) -> bool:
    """Let buckets have what was pending before a captured step, of which nothing has run. Return if there was one."""
    for bucket, (applied, product) in before.items():
        bucket.applied, bucket.product = applied, product
    return bool(before)
