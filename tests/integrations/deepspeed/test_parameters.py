"""ZeRO's parameters as differences: copies follow masters as a plain model says, through faults and checkpoints."""

import contextlib
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.wire_format import BLOCK, DIFFERENCES
from powersgd_triton.ops.differences import apply_reference, encode_reference
from tests.support.balance import check_same
from tests.support.deepspeed_training import (
    ACCUMULATE,
    BF16,
    BF16_OPTIMIZER,
    FP16,
    LOGGED,
    OFFLOAD,
    Case,
    each,
    engine_for,
    halving_scale,
    logged_bytes,
    losses,
    spoiled,
    zero,
)
from tests.support.distributed import folder, make_test
from tests.support.sharded_training import Net, batch
from tests.support.training import complaint

INT2 = {"rank": 4, "parameters": "int2"}
SMALL_MESSAGES = zero(allgather_bucket_size=700, overlap_comm=True, reduce_bucket_size=2000)
STAGE_1, STAGE_2_BF16 = Case("stage 1", 1), Case("stage 2, bf16", 2, BF16)
IN_BF16 = Case("BF16_Optimizer", 1, BF16_OPTIMIZER)
OFFLOADED = Case("stage 2, offload", 2, OFFLOAD, optimizer="adamw")
LITTLE = Case("stage 2, small messages", 2, {**BF16, **SMALL_MESSAGES})
# (case, width, whether the model has tied and frozen parameters)
FOLLOWED: list[tuple[Case, str, bool]] = [
    (STAGE_1, "int2", False),
    (Case("stage 2, bf16", 2, {**BF16, **ACCUMULATE, "gradient_clipping": 0.3}), "int2", True),
    (Case("stage 1, bf16, round robin", 1, {**BF16, **zero(round_robin_gradients=True)}), "int8", False),
    (IN_BF16, "int2", False),
    (Case("stage 1, fp16", 1, FP16), "int2", False),
]
MORE: list[tuple[Case, str, bool]] = [
    (Case("stage 2, small messages", 2, SMALL_MESSAGES), "int4", True),
    (OFFLOADED, "int2", False),
    (Case("stage 2, SGD", 2, optimizer="sgd"), "int2", False),
]
MORE_WORKERS: list[tuple[Case, str, bool]] = [
    (STAGE_1, "int4", True),
    (IN_BF16, "int8", False),
    (LITTLE, "int2", False),
]
PLAIN, OTHERS = [STAGE_1, IN_BF16], [STAGE_2_BF16, OFFLOADED]


class Tied(Net):
    """Its head shares the embedding's weights, its first block is frozen, and the optimizer has two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight
        self.blocks[0].requires_grad_(False)

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups: matrices, and vectors without weight decay."""
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def copies(engine: Any) -> list[Tensor]:
    """v of each parameter group, [workers, elements of a partition]."""
    return [group.rows.clone() for group in engine.powersgd.parameters._groups()]


def masters(engine: Any) -> list[Tensor]:
    """w of each parameter group, of all workers, [workers, elements of a partition]."""
    found = []
    for own in [group.masters for group in engine.powersgd.parameters._groups()]:
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own.clone())
        found.append(torch.stack(gathered))
    return found


def rounded(engine: Any) -> list[Tensor]:
    """w of each parameter group, in the dtype of v."""
    return [w.to(v.dtype) for w, v in zip(masters(engine), copies(engine), strict=True)]


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """To the bit."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def modelled(
    before: Sequence[Tensor], wanted: Sequence[Tensor], width: str, slices: int, used: Sequence[int]
) -> list[Tensor]:
    """The copies after a step. A message has ``slices`` elements at most, the first ``used`` are of parameters."""
    form, expected = DIFFERENCES[width], [copy.clone() for copy in before]
    for copy, targets, numel in zip(expected, wanted, used, strict=True):
        each_time = max(BLOCK, slices // len(copy) // BLOCK * BLOCK)
        for rows, wished in zip(copy.split(each_time, dim=1), targets.split(each_time, dim=1), strict=True):
            content = torch.zeros(len(rows), form.difference_bytes(rows.shape[1])[1], dtype=torch.uint8)
            for row, target, out in zip(rows, wished, content, strict=True):
                encode_reference(Encoding(target, row, form, out))
            apply_reference(Decoding(content, form, rows))
        copy.view(-1)[numel:] = 0
    return expected


def follows(case: Case, width: str, tied: bool, steps: int = 10, seed: int = 0) -> None:
    """Steps, some of which overflow, against the plain model."""
    draw = random.Random(seed)
    moved = skipped = False
    with engine_for(case, {**INT2, "parameters": width}, Tied() if tied else None) as engine:
        optimizer = engine.optimizer
        if "fp16" not in case.options and hasattr(optimizer, "loss_scaler"):
            # Halves when a gradient overflows, as with fp16.
            optimizer.loss_scaler = halving_scale()
        groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
        used = [sum(map(torch.numel, group)) for group in groups]
        assert len(used) == (2 if tied else 1)
        parameter = dict(engine.module.named_parameters())["blocks.1.up.weight"]
        for step in range(steps):
            before, previous = copies(engine), masters(engine)
            overflows = step == 2 or (step > 0 and draw.random() < 0.2)
            if draw.random() < 0.1:
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3 * draw.choice([0.01, 1.0, 30.0])
            with spoiled(parameter) if overflows else contextlib.nullcontext():
                losses(engine, [step])
            after, wanted = copies(engine), masters(engine)
            if overflows and getattr(optimizer, "overflow", False):
                assert equal([*after, *wanted], [*before, *previous]), "a step that overflowed changed something"
                skipped = True
                continue
            assert equal(after, modelled(before, wanted, width, optimizer.allgather_bucket_size, used)), step
            moved |= not equal([v.float() for v in after], wanted)
        assert moved, "the copies are the masters: nothing was rounded"
        assert skipped or case == IN_BF16, "no step overflowed"
        check_same([parameter.detach().float() for parameter in engine.module.parameters()])


def resumes(case: Case) -> None:
    """Three steps, saved, three more; and these again by another engine. Then on with DeepSpeed's gather, and back."""
    # With gradients as they are: the mean of compression's errors is equal to rounding only.
    exact = {**INT2, "start_iter": 99}
    with folder(dist.get_rank()) as path:
        with engine_for(case, exact) as engine:
            losses(engine, range(3))
            engine.save_checkpoint(path)
            saved = masters(engine) + copies(engine)
            losses(engine, range(3, 6))
            expected = masters(engine) + copies(engine)
        with engine_for(case, exact) as engine:
            engine.load_checkpoint(path)
            assert equal(masters(engine) + copies(engine), saved)
            losses(engine, range(3, 6))
            assert equal(masters(engine) + copies(engine), expected)
        with engine_for(case, {**INT2, "parameters": None}) as engine:
            engine.load_checkpoint(path)
            losses(engine, range(5, 7))
            engine.save_checkpoint(f"{path}/null")
        with engine_for(case, INT2) as engine:
            engine.load_checkpoint(f"{path}/null")
            assert equal(rounded(engine), copies(engine))
            losses(engine, range(7, 9))


def exports_the_masters(case: Case) -> None:
    """And v stays as it is."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with folder(dist.get_rank()) as path, engine_for(case, INT2) as engine:
        losses(engine, range(3))
        before, wanted = copies(engine), rounded(engine)
        assert not equal(before, wanted)
        with engine.powersgd.exact_parameters():
            assert equal(copies(engine), wanted)
            exact = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
            with engine.powersgd.exact_parameters():
                pass
            assert equal(copies(engine), wanted), "an inner context ended the outer one"
        engine.save_16bit_model(path, "model.bin")
        engine.save_checkpoint(path)
        assert equal(copies(engine), before)
        dist.barrier()
        written = torch.load(Path(path) / "model.bin", weights_only=True)
        assert all(torch.equal(written[name], tensor) for name, tensor in exact.items())
        # DeepSpeed's program does not know BF16_Optimizer's checkpoints.
        if case != IN_BF16:
            whole = get_fp32_state_dict_from_zero_checkpoint(path)
            assert all(torch.equal(whole[name].to(tensor.dtype), tensor) for name, tensor in exact.items())


def keeps_its_copies_when_a_step_fails(case: Case) -> None:
    """And says what is wrong."""
    with engine_for(case, {**INT2, "check_every": 2}) as engine:
        with torch.inference_mode(), engine.powersgd.exact_parameters():
            engine(batch(0, 0)[0])
        losses(engine, range(2))
        optimizer = engine.optimizer
        before, inner = copies(engine), optimizer.optimizer.step

        def failing(*args: Any, **kwargs: Any) -> Any:
            inner(*args, **kwargs)
            # The optimizer has a group that it has rounded into v already.
            for group in engine.powersgd.parameters._groups():
                group.own.copy_(group.masters)
            raise MemoryError("no memory is left")

        optimizer.optimizer.step = failing
        assert complaint(losses, engine, [2]) == "MemoryError: no memory is left"
        assert equal(copies(engine), before)
        optimizer.optimizer.step = inner
        with engine.powersgd.exact_parameters():
            assert "a step inside exact_parameters()" in complaint(losses, engine, [3])
        losses(engine, [4])
        if dist.get_rank() == 1:
            with torch.no_grad():
                dict(engine.module.named_parameters())["blocks.0.up.weight"][0, 0] += 1
        # Found by ``check_every``.
        said = complaint(losses, engine, [5])
        assert "DisagreementError" in said
        assert "parameters of group 0" in said
        with engine.powersgd.exact_parameters():
            pass
        losses(engine, [6, 7])
        engine.powersgd.parameters._send = lambda **_: None
        assert "gathered them without all_gather_dp_groups" in complaint(losses, engine, [8])


def learns_in_a_pipeline(case: Case) -> None:
    """Workers of a stage have the same copies."""
    with engine_for(case, INT2) as engine:
        found = losses(engine, range(10))
        assert found[-1] < found[0] - 0.5
        check_same(copies(engine), engine.mpu.get_data_parallel_group())


def sends_what_is_reported(case: Case) -> None:
    """Bytes a step that one owner sends, by DeepSpeed's own logger."""
    from powersgd_triton.integrations.deepspeed import expected_traffic

    sent = []
    for section in (None, INT2):
        with engine_for(dataclasses.replace(case, options={**case.options, **LOGGED}), section) as engine:
            sent.append(sum(size for name, size in logged_bytes(engine).items() if "gather" in name))
            if section is not None:
                assert sent[-1] == expected_traffic(engine, engine.powersgd).differences / (dist.get_world_size() - 1)
    if case != LITTLE:
        # 2 bits and a scale for 128 elements, and at most one block in each partition that is not full.
        assert sent[0] / sent[1] > 0.94 * (16 if "bf16" in case.options else 32) / (2 + 16 / 128)


test_two_workers = make_test(
    {
        **each(follows, *FOLLOWED),
        **each(resumes, *PLAIN),
        **each(exports_the_masters, *PLAIN),
        **each(keeps_its_copies_when_a_step_fails, *PLAIN),
        **each(sends_what_is_reported, *PLAIN, STAGE_2_BF16),
        **each(learns_in_a_pipeline, Case("one stage", 1, BF16, pipeline_stages=1)),
    },
    2,
)
test_more = pytest.mark.slow(
    make_test(
        {
            **each(follows, *MORE),
            **each(resumes, *OTHERS),
            **each(exports_the_masters, *OTHERS),
            **each(keeps_its_copies_when_a_step_fails, STAGE_2_BF16),
            **each(sends_what_is_reported, LITTLE),
        },
        2,
    )
)
test_three_workers = make_test(each(follows, *[(*one, 6, 1) for one in MORE_WORKERS[:2]]), 3)
STAGES = each(learns_in_a_pipeline, Case("two stages", 1, pipeline_stages=2))
test_four_workers = pytest.mark.slow(make_test(each(follows, *[(*one, 10, 1) for one in MORE_WORKERS]) | STAGES, 4))
