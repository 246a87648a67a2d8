"""What the tests of DeepSpeed's parameters as differences do inside a worker."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powersgd_triton.layout.wire_format import BLOCK, DIFFERENCES
from powersgd_triton.ops.differences import apply_reference, encode_reference
from tests.support.deepspeed_jobs import spoiled
from tests.support.deepspeed_training import (
    Case,
    Net,
    StubScaler,
    batch,
    engine_for,
    largest_difference,
    losses,
    pipeline_losses,
)
from tests.support.distributed import HUNG
from tests.support.small import complaint
from tests.support.training import digest

INT2 = {"rank": 4, "parameters": "int2"}
UNIVERSAL = {"checkpoint": {"load_universal": True}}


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


@contextlib.contextmanager
def prepared(case: Case, section: Mapping[str, Any] | None, model: nn.Module | None = None) -> Iterator[Any]:
    """An engine whose loss scale halves when a gradient overflows, as with fp16."""
    with engine_for(case, section, model) as engine:
        if case.stage and not case.fp16 and hasattr(engine.optimizer, "loss_scaler"):
            engine.optimizer.loss_scaler = StubScaler()
        yield engine


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


def modelled(
    before: Sequence[Tensor], wanted: Sequence[Tensor], width: str, slices: int, used: Sequence[int]
) -> list[Tensor]:
    """What the copies must be after a step: a plain model of it.

    Args:
        before: the copies before it.
        wanted: the masters after it.
        width: of the differences.
        slices: elements of a message, of all workers, at most.
        used: elements of each group that belong to parameters, the first ones.
    """
    form, expected = DIFFERENCES[width], [copy.clone() for copy in before]
    for copy, targets in zip(expected, wanted, strict=True):
        each = max(BLOCK, slices // len(copy) // BLOCK * BLOCK)
        for rows, wished in zip(copy.split(each, dim=1), targets.split(each, dim=1), strict=True):
            content = torch.zeros(len(rows), form.difference_bytes(rows.shape[1])[1], dtype=torch.uint8)
            for row, target, out in zip(rows, wished, content, strict=True):
                encode_reference(target, row, form, out)
            apply_reference(content, form, rows)
    for copy, numel in zip(expected, used, strict=True):
        copy.view(-1)[numel:] = 0
    return expected


def excess(before: Sequence[Tensor], after: Sequence[Tensor], wanted: Sequence[Tensor], levels: int) -> float:
    """Largest |w − v| in units of what is allowed: the scale of the block's difference, and half a unit of v."""
    largest = 0.0
    for old, new, target in zip(before, after, wanted, strict=True):
        for v_old, v, w in zip(old.float(), new, target.float(), strict=True):
            gap = torch.nn.functional.pad((w - v_old).abs(), (0, -len(w) % BLOCK)).view(-1, BLOCK).amax(1)
            # The scale is rounded to 8 bits.
            step = gap.repeat_interleave(BLOCK)[: len(w)] / levels * (1 + 2**-6)
            _, exponent = torch.frexp(v.float())
            unit = torch.ldexp(torch.tensor(torch.finfo(v.dtype).eps), exponent - 1)
            smallest = torch.finfo(v.dtype).tiny
            largest = max(largest, float(((w - v.float()).abs() / (step + unit / 2 + smallest)).max()))
    return largest


def convert(saved: Path, universal: Path) -> Path:
    """A checkpoint's universal form, which any number of workers loads. Without the compression's state."""
    arguments = ["--input_folder", saved, "--output_folder", universal, "--inject_missing_state"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, arguments), *workers]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run(converter, check=True, capture_output=True, timeout=HUNG, env=environment)
    return universal


def follow(
    case: Case, width: str, steps: int, seed: int = 0, tied: bool = False, load: str = "", save: str = ""
) -> dict[str, Any]:
    """Steps, some of which overflow, against the plain model.

    Args:
        case: configuration.
        width: of the differences.
        steps: of training.
        seed: of what goes wrong.
        tied: train ``Tied``.
        load: a universal checkpoint's folder, to begin with.
        save: folder of a checkpoint at the end.
    """
    draw = random.Random(seed)
    found: dict[str, Any] = {"as modelled": True, "excess": 0.0, "skipped": True, "moved": False}
    with prepared(case, {"rank": 4, "parameters": width}, Tied() if tied else None) as engine:
        bucket = engine.optimizer.allgather_bucket_size
        if load:
            engine.load_checkpoint(load, "saved")
            rounded = [w.to(v.dtype) for w, v in zip(masters(engine), copies(engine), strict=True)]
            found["loaded"] = all(map(torch.equal, rounded, copies(engine)))
        parameters = getattr(engine.optimizer, engine.powersgd.parameters._attributes[1])
        used = [sum(map(torch.numel, group)) for group in parameters]
        found["groups"] = len(used)
        for step in range(steps):
            before, previous = copies(engine), masters(engine)
            overflows = case.stage > 0 and step > 0 and draw.random() < 0.2
            parameter = dict(engine.module.named_parameters())["blocks.1.up.weight"]
            if draw.random() < 0.1:
                for group in engine.optimizer.param_groups:
                    group["lr"] = 3e-3 * draw.choice([0.01, 1.0, 30.0])
            with spoiled(parameter, float("inf")) if overflows else contextlib.nullcontext():
                losses(engine, [step])
            after, wanted = copies(engine), masters(engine)
            if overflows and getattr(engine.optimizer, "overflow", False):
                found["skipped"] &= all(map(torch.equal, [*before, *previous], [*after, *wanted]))
                continue
            expected = modelled(before, wanted, width, bucket, used)
            found["as modelled"] &= all(map(torch.equal, after, expected))
            found["moved"] |= not all(torch.equal(v.float(), w) for v, w in zip(after, wanted, strict=True))
            found["excess"] = max(found["excess"], excess(before, after, wanted, DIFFERENCES[width].levels))
        found["digest"] = digest([parameter.detach().float() for parameter in engine.module.parameters()])
        if save:
            engine.save_checkpoint(save, "saved")
    return found


def unchanged_without(case: Case) -> bool:
    """Whether ``"parameters": null`` trains as plain DeepSpeed, to the bit. No step compresses gradients."""
    digests = []
    for section in (None, {"rank": 4, "start_iter": 99, "parameters": None}):
        with engine_for(case, section) as engine:
            losses(engine, range(4))
            digests.append(digest([parameter.detach().float() for parameter in engine.module.parameters()]))
    return digests[0] == digests[1]


def resume(case: Case, folder: str) -> dict[str, Any]:
    """Five steps, saved, five more; and these again by another engine. Then on with DeepSpeed's gather, and back."""
    # With gradients as they are: the mean of compression's errors is equal to rounding only.
    for section in ({**INT2, "start_iter": 99}, INT2):
        with engine_for(case, section) as engine:
            losses(engine, range(5))
            engine.save_checkpoint(folder)
            saved = masters(engine) + copies(engine)
            expected = losses(engine, range(5, 10)), digest(masters(engine) + copies(engine))
        with engine_for(case, section) as engine:
            engine.load_checkpoint(folder)
            found = {"resumed": all(map(torch.equal, masters(engine) + copies(engine), saved))}
            got = losses(engine, range(5, 10)), digest(masters(engine) + copies(engine))
        if section is not INT2:
            same = got == expected
    found["same bits"] = same
    found["close"] = largest_difference(got[0], expected[0]) < 1e-4
    with engine_for(case, {**INT2, "parameters": None}) as engine:
        engine.load_checkpoint(folder)
        losses(engine, range(5, 7))
        engine.save_checkpoint(folder + "-null")
    with engine_for(case, INT2) as engine:
        engine.load_checkpoint(folder + "-null")
        rounded = [w.to(v.dtype) for w, v in zip(masters(engine), copies(engine), strict=True)]
        found["from null"] = all(map(torch.equal, rounded, copies(engine)))
        losses(engine, range(7, 9))
    return found


def export(case: Case, folder: str) -> dict[str, bool]:
    """What exports write, and that v stays as it is."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with engine_for(case, INT2) as engine:
        losses(engine, range(3))
        before, wanted = copies(engine), masters(engine)
        rounded = [w.to(v.dtype) for w, v in zip(wanted, before, strict=True)]
        with engine.powersgd.exact_parameters():
            found = {"exact": all(map(torch.equal, copies(engine), rounded))}
            exact = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
            with engine.powersgd.exact_parameters():
                pass
            found["nested"] = all(map(torch.equal, copies(engine), rounded))
        found["differed"] = not all(map(torch.equal, before, rounded))
        engine.save_16bit_model(folder, "model.bin")
        engine.save_checkpoint(folder)
        found["kept"] = all(map(torch.equal, copies(engine), before))
        dist.barrier()
        written = torch.load(Path(folder) / "model.bin", weights_only=True)
        found["16 bit"] = all(torch.equal(written[name], tensor) for name, tensor in exact.items())
        # DeepSpeed's program does not know BF16_Optimizer's checkpoints.
        if hasattr(engine.optimizer, "single_partition_of_fp32_groups"):
            whole = get_fp32_state_dict_from_zero_checkpoint(folder)
            found["fp32"] = all(torch.equal(whole[name].to(t.dtype), t) for name, t in exact.items())
        dist.barrier()
        after = losses(engine, range(3, 5))
    with engine_for(case, INT2) as engine:
        found["goes on"] = losses(engine, range(5))[3:] == after
    return found


def refused_or_broken(case: Case) -> dict[str, Any]:
    """What raises an error in a step, and leaves the copies."""
    found: dict[str, Any] = {}
    with engine_for(case, {**INT2, "check_every": 2}) as engine:
        with torch.inference_mode(), engine.powersgd.exact_parameters():
            engine(batch(0))
        losses(engine, range(2))
        seam, optimizer = engine.powersgd.parameters, engine.optimizer
        before, inner = copies(engine), optimizer.optimizer.step

        def failing(*args: Any, **kwargs: Any) -> Any:
            inner(*args, **kwargs)
            # The optimizer has a group that it has rounded into v already.
            for group in seam._groups():
                group.own.copy_(group.masters)
            raise MemoryError("no memory is left")

        optimizer.optimizer.step = failing
        found["failed"] = complaint(losses, engine, [2])
        found["kept"] = all(map(torch.equal, copies(engine), before))
        optimizer.optimizer.step = inner
        with engine.powersgd.exact_parameters():
            found["inside"] = complaint(losses, engine, [3])
        losses(engine, [4])
        if dist.get_rank() == 1:
            with torch.no_grad():
                dict(engine.module.named_parameters())["blocks.0.up.weight"][0, 0] += 1
        found["changed"] = complaint(losses, engine, [5])
        with engine.powersgd.exact_parameters():
            pass
        losses(engine, [6, 7])
    with engine_for(case, INT2) as engine:
        losses(engine, range(1))
        seam = engine.powersgd.parameters
        seam._send = lambda **_: None
        found["went around"] = complaint(losses, engine, [1])
    return found


def pipeline(case: Case) -> dict[str, Any]:
    """A pipeline whose parameters are sent as differences."""
    with engine_for(case, INT2) as engine:
        assert engine.powersgd.parameters is not None
        found = pipeline_losses(engine, range(10))
        stage = engine.mpu.get_stage_id() if case.pipeline_stages > 1 else 0
        return {"learned": found[-1] < found[0] - 0.5, "stage": stage, "digest": digest(copies(engine))}


def gathered_bytes(case: Case, section: Mapping[str, Any] | None) -> dict[str, float]:
    """Bytes a step that one owner sends, by DeepSpeed's own logger, and as expected."""
    from deepspeed.comm.comm import comms_logger

    from powersgd_triton.integrations.deepspeed import expected_traffic

    options = {**case.options, "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}}
    with engine_for(Case("", case.stage, options), section) as engine:
        losses(engine, range(1))
        comms_logger.comms_dict.clear()
        losses(engine, range(1, 3))
        found = 0.0
        for name, sizes in comms_logger.comms_dict.items():
            found += sum(size * record[0] for size, record in sizes.items() if "gather" in name) / 2
        comms_logger.enabled = False
        expected = (
            expected_traffic(engine, engine.powersgd).differences / (dist.get_world_size() - 1) if section else 0.0
        )
    return {"logged": found, "expected": expected}
