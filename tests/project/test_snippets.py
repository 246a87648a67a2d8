"""The Python blocks of the README and docs/ run as they stand, on two workers of a machine without GPUs.

A block finds what its reader has: a model, wrapped or not, an optimizer, data, sizes of a mesh. It imports all else.
The blocks of a page run in order, as if pasted one after the other. Whole programs, which start a process group, run
by themselves.
"""

import functools
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig, attach
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.distributed import folder, make_test
from tests.support.programs import DOCS, PAGES, ROOT, name_of, output_of, snippets

ON_CPUS = {
    '"cuda"': '"cpu"',
    "use_orig_params=True": "use_orig_params=True, device_id=__import__('torch').device('cpu')",
}
"""What a block says of GPUs, and what it would say on this machine."""
DEEPSPEED = ["docs/guides/deepspeed.md", "docs/guides/local-steps.md"]
# DeepSpeed would compile its own Adam.
DS_CONFIG = """{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1},
"optimizer": {"type": "AdamW", "params": {"torch_adam": true}}%s}"""


def is_program(block: str) -> bool:
    return "init_process_group" in block or "Accelerator(" in block or "Trainer(" in block


def blocks_of(page: str) -> list[str]:
    return [block for block in snippets(ROOT / page, "python") if not is_program(block)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def what_a_reader_has(page: str) -> dict[str, Any]:
    """Fresh objects under the names that the pages use for them."""
    model = net()
    batches = [(torch.randn(4, 32), torch.randn(4, 32)) for _ in range(10)]
    has: dict[str, Any] = {
        "model": model,
        "ddp_model": DistributedDataParallel(model),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": batches,
        "loss_function": nn.functional.mse_loss,
        "loss": model(batches[0][0]).square().mean(),
        "shapes": {"weight": (64, 32)},
        "folder": "checkpoint",
        "plan": {},
        **dict.fromkeys(("replicas", "nodes"), 2),
        **dict.fromkeys(("shards", "workers_of_a_node", "parts"), 1),
    }
    if "cluster" in page or page == "README.md":
        has["fsdp_model"] = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    if "checkpoints" in page:
        old, has["state"] = (Compressor(PowerSGDConfig(rank=2), {f"{name}.name": (32, 32)}) for name in ("old", "new"))
        old.compress([torch.randn(32, 32)])
        has["saved"] = old.state_dict()
        has["powersgd"] = attach(has["ddp_model"], rank=2)
    if "telemetry" in page:
        has["state"] = Compressor(PowerSGDConfig(rank=2), dict(model.named_parameters()))
    if "local-steps" in page:
        has["sync"] = LocalSteps(model, PowerSGDConfig(quantize="ternary"), every=10)
    if "torchtitan" in page:
        has["powersgd"] = None
        has["trainer"] = types.SimpleNamespace(checkpointer=types.SimpleNamespace(states={}))
    # Not needed to use the package.
    writer = types.SimpleNamespace(SummaryWriter=lambda _: types.SimpleNamespace(add_scalar=print))
    loaded: dict[str, Any] = sys.modules
    loaded["torch.utils.tensorboard"] = writer
    return has


def test_whole_programs_are_run():
    """As files of docs/examples, all but two: the README's, which the first page repeats, and that of DDP's guide."""
    programs = {block for page in PAGES for block in snippets(page, "python") if is_program(block)}
    files = [path.read_text(encoding="utf-8") for path in (DOCS / "examples").glob("*.py")]
    assert len([block for block in programs if block not in files]) == 2


def runs(page: str, worker: int, world_size: int) -> None:
    with folder(worker) as path:
        os.chdir(path)
        if page in DEEPSPEED:
            use_deepspeed(worker, section="local" not in page)
        found: dict[str, Any] = {"__name__": "__main__"}
        for number, block in enumerate(blocks_of(page), 1):
            for gpu, cpu in ON_CPUS.items():
                block = block.replace(gpu, cpu)
            found |= what_a_reader_has(page)
            exec(compile(block, f"{page}, block {number}", "exec"), found)
        os.chdir("/")


def use_deepspeed(worker: int, *, section: bool) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(worker))
    import deepspeed

    # Not compiled for a test.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    Path("ds_config.json").write_text(DS_CONFIG % (', "powersgd": {"compression": 20}' if section else ""))


@pytest.mark.slow
def test_the_program_of_the_ddp_guide_prints_what_the_guide_says(tmp_path: Path):
    guide = ROOT / "docs" / "guides" / "ddp.md"
    (program,) = filter(is_program, snippets(guide, "python"))
    (tmp_path / "train.py").write_text(program)
    said = output_of("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py", cwd=tmp_path)
    # Losses, and shares of energy, depend on the processor in their last digits.
    number = re.compile(r"[\d.,]*\d")
    (expected,) = snippets(guide, "text")[:1]
    assert number.sub("…", said).split() == number.sub("…", expected).split()
    losses = re.compile(r"loss (\S+)")
    assert [*map(float, losses.findall(said))] == pytest.approx([*map(float, losses.findall(expected))], rel=0.1)


CASES = {name_of(page): functools.partial(runs, name_of(page)) for page in PAGES}
test_blocks_run = make_test({name: case for name, case in CASES.items() if blocks_of(*case.args)}, 2)
