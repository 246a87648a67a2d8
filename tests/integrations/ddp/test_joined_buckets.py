"""Joined buckets: messages of small buckets go together, on one level or two, and nothing else changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.distributed import environment, make_test
from tests.support.exchanges import latency_decides
from tests.support.properties import check_same
from tests.support.sharded_training import sent_elements
from tests.support.small import MANY, RANK_2, WIDTH, complaint, stack, training
from tests.support.training import check_training, relative, step_differences, total

SAME = 1e-4
"""Relative difference of gradients in some steps, since joined matrices are multiplied in other batches."""
NODES: tuple[str | None, ...] = (None, "auto")


class TwoDtypes(nn.Module):
    """Layers in bf16 and then in fp32, so that the dtype of DDP's buckets changes in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack()
        self.layers[:3].to(torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers[3:](self.layers[:3](inputs.bfloat16()).float())
        return outputs


def state_for(model: nn.Module, node_group: Any = None, **settings: Any) -> PowerSGDState:
    return PowerSGDState(None, module=model, node_group=node_group, **{**RANK_2, **settings})


TRAININGS: list[tuple[Callable[[], nn.Module], str | None, dict[str, Any]]] = [
    (stack, None, {}),
    (stack, "auto", {}),
    (stack, "auto", {"algorithm": "alternating"}),
    (stack, None, {"start_powerSGD_iter": 2}),
    (TwoDtypes, None, {}),
]


def joined(worker: int, world_size: int) -> None:
    """The same training with separate and with joined buckets, in fewer messages with as many elements."""
    for make, node_group, settings in TRAININGS:
        runs, errors, sent = [], [], []
        for how in (contextlib.nullcontext(), latency_decides()):
            with environment(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(worker % 2)), how, sent_elements() as numels:
                model = make()
                state = state_for(model, node_group, **settings)
                runs.append(training(model, worker, state, range(3), cap=0.005).gradients)
                sent.append(list(numels))
                errors.append({name: total(error) for name, error in state.error().items()})
        coarse = make is TwoDtypes
        assert max(step_differences(runs[1], runs[0])) <= (0.02 if coarse else SAME), (node_group, settings)
        for name, error in errors[0].items():
            assert relative(errors[1][name], error) <= (0.1 if coarse else SAME), (node_group, settings, name)
        check_same([gradient for gradients in runs[1] for gradient in gradients.values()])
        assert len(sent[1]) < len(sent[0])
        assert sum(sent[1]) == sum(sent[0])


def interrupted(worker: int, world_size: int) -> None:
    """An exception while buckets wait: they are forgotten, and the next step sends all of its own gradients."""
    for node_group in NODES:
        with environment(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(worker % 2)), latency_decides():
            model = stack()
            state = state_for(model, node_group, wire_dtype="int4")
            training(model, worker, state, range(2))

            def stop(_: Tensor) -> None:
                raise KeyError("stop")

            handle = model[0].weight.register_hook(stop)  # type: ignore[operator]
            said = complaint(training, model, worker, state, range(1), find_unused_parameters=True)
            assert "KeyError" in said, said
            handle.remove()
            # As saved and loaded right after it.
            state.load_state_dict(state.state_dict())
            check_training(model, worker, state, range(3), bucket_cap_mb=MANY, width=WIDTH, find_unused_parameters=True)


test_joined_buckets = make_test([joined, interrupted], 4)
