"""Plans ranks anew from what a step's factors show, where the configuration gives a budget instead of a rank."""

from __future__ import annotations

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core.state import State


class Replanner:
    """What is done about ranks between steps.

    Args:
        state: the model's state.
        communicator: whom to average with.
    """

    def __init__(self, state: State, communicator: Communicator) -> None:
        self._state = state
        self._communicator = communicator

    def end_step(self) -> None:
        """After a step: use what was measured a step ago, and measure where it is time to. Collective.

        What is summed over workers is one number a matrix. Nothing waits for the step that has just ended.
        """
        plan = self._state.plan
        if plan.replan():
            # The factors that there are have the ranks of the plan before.
            return
        measurement = self._state.measure()
        if measurement is not None:
            self._communicator.mean(measurement.totals)
            measurement.send()
            plan.pending = measurement
