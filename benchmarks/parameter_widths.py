"""Loss of training with copies of the parameters that follow the optimizer's own by differences of each width.

python benchmarks/parameter_widths.py run --model text|digits [--seeds 0 1 2] [--copies bf16 fp32] [--widths int2 …]
python benchmarks/parameter_widths.py report

As in ZeRO stages 1 and 2: each worker owns the parameters of one partition, and all workers compute gradients at the
copies. ``run`` adds what is missing to benchmarks/results/parameter-widths.json and can be interrupted. ``report``
prints a table for each model.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import digits
from benchmarks.markdown import markdown_table
from powersgd_triton.demo import train as demo
from powersgd_triton.demo.arms import Arm, communication
from powersgd_triton.demo.model import CONTEXT, GPT, next_token_loss, read_corpus, sample_batch
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.wire_format import DIFFERENCES
from powersgd_triton.ops.differences import apply_reference, encode_reference

FILE = Path(__file__).parent / "results" / "parameter-widths.json"
STEPS = {"text": 600, "digits": 300}
SEEDS = {"text": (0, 1, 2), "digits": (0, 1, 2, 3, 4)}
COPIES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTHS = ("exact", "int8", "int4", "int2")
GRADIENTS = ("allreduce", "ours:16+int4")
WORKERS = 2
Record = dict[str, Any]


class Copies:
    """A model whose parameters are copies, in some dtype and width, of flat parameters that an optimizer updates.

    Attributes:
        masters: The parameters that the optimizer updates, fp32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, width: str) -> None:
        self._parameters = list(model.parameters())
        self._width = DIFFERENCES.get(width)
        flat = torch.cat([parameter.detach().flatten() for parameter in self._parameters])
        self.masters = nn.Parameter(nn.functional.pad(flat, (0, -len(flat) % WORKERS)))
        self._copies = self.masters.detach().clone().to(dtype).view(WORKERS, -1)
        self._show()

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Update the optimizer's parameters with the gradients at the copies, and send the differences."""
        for parameter in self._parameters:
            parameter.grad = None
        loss.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in self._parameters if parameter.grad is not None])
        self.masters.grad = nn.functional.pad(flat, (0, len(self.masters) - len(flat)))
        optimizer.step()
        targets = self.masters.detach().view(WORKERS, -1)
        if self._width is None:
            self._copies.copy_(targets)
        else:
            _, size = self._width.difference_bytes(targets.shape[1])
            content = torch.empty(WORKERS, size, dtype=torch.uint8)
            for target, copy, out in zip(targets, self._copies, content, strict=True):
                encode_reference(Encoding(target, copy, self._width, out))
            apply_reference(Decoding(content, self._width, self._copies))
        self._show()

    @torch.no_grad()
    def _show(self) -> None:
        first = 0
        for parameter in self._parameters:
            parameter.copy_(self._copies.view(-1)[first : first + parameter.numel()].view_as(parameter))
            first += parameter.numel()


def train_all(worker: int, runs: Sequence[Record]) -> None:
    """Train one after the other, and record each."""
    for key in runs:
        record = {**key, **TRAINING[key["model"]](worker, **{k: v for k, v in key.items() if k != "model"})}
        record["torch"] = torch.__version__
        if worker == 0:
            FILE.write_text(json.dumps([*read(), record], indent=1) + "\n")
            print(", ".join(f"{key} {value}" for key, value in record.items()), flush=True)


def train_text(worker: int, seed: int, copies: str, gradients: str, width: str, steps: int) -> Record:
    """Return the validation loss of the copies, in nats per character."""
    torch.manual_seed(seed)
    (training, validation), model = read_corpus(), GPT()
    own = Copies(model, COPIES[copies], width)
    replica = replicate(model, gradients)
    generator = torch.Generator().manual_seed(seed + 1 + worker)
    optimizer = torch.optim.AdamW([own.masters], lr=demo.LEARNING_RATE, weight_decay=demo.WEIGHT_DECAY)
    factor = functools.partial(demo.learning_rate_factor, steps=steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(steps):
        loss = next_token_loss(replica, *sample_batch(training, demo.BATCH_PER_WORKER, CONTEXT, generator))
        own.step(loss, optimizer)
        schedule.step()
    return {"loss": demo.validation_loss(model, validation, torch.device("cpu"))}


def train_digits(worker: int, seed: int, copies: str, gradients: str, width: str, steps: int) -> Record:
    """Return the validation loss of the copies, in nats per image, and the accuracy in percent."""
    torch.manual_seed(seed)
    images, labels = digits.images_and_labels()
    model = digits.perceptron()
    own = Copies(model, COPIES[copies], width)
    replica = replicate(model, gradients)
    generator = torch.Generator().manual_seed(seed + 1 + worker)
    optimizer = torch.optim.SGD([own.masters], lr=digits.LEARNING_RATE, momentum=digits.MOMENTUM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        size = (digits.PERCEPTRON.batch_per_worker,)
        batch = torch.randint(digits.VALIDATION_IMAGES, len(labels), size, generator=generator)
        own.step(nn.functional.cross_entropy(replica(images[batch]), labels[batch]), optimizer)
        schedule.step()
    return digits.validate(model, images, labels)


def replicate(model: nn.Module, gradients: str) -> nn.Module:
    """Return DDP's replica of a model whose gradients are averaged as an arm of the demo says."""
    replica = DistributedDataParallel(model, bucket_cap_mb=1024)
    replica.register_comm_hook(*communication(Arm.parse(gradients, 16), model))
    return replica


TRAINING: dict[str, Callable[..., Record]] = {"text": train_text, "digits": train_digits}


def read() -> list[Record]:
    """All trainings so far."""
    records: list[Record] = json.loads(FILE.read_text()) if FILE.exists() else []
    return records


def run(
    model: str, seeds: Sequence[int], copies: Sequence[str], widths: Sequence[str], gradients: Sequence[str]
) -> None:
    """Train what the file does not have yet."""
    missing = []
    for seed, form, arm, width in itertools.product(seeds, copies, gradients, widths):
        key = {"model": model, "seed": seed, "copies": form, "gradients": arm, "width": width, "steps": STEPS[model]}
        if not any(key.items() <= record.items() for record in read()):
            missing.append(key)
    if missing:
        demo.run_workers(functools.partial(train_all, runs=missing), WORKERS, timeout=600 * len(missing))


def table(model: str) -> str:
    """Markdown: losses of each width beside those of exact parameters."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for record in read():
        if record["model"] == model:
            key = record["copies"], record["gradients"], record["width"]
            found.setdefault(key, {})[record["seed"]] = record["loss"]
    lines = [["copies", "gradients", "parameters", "validation loss", "above exact parameters", "seeds"], ["---"] * 6]
    for (form, arm, width), losses in found.items():
        exact = found.get((form, arm, "exact"), {})
        excess = [100 * (loss / exact[seed] - 1) for seed, loss in losses.items() if seed in exact]
        above = f"{statistics.fmean(excess):+.2f}%" if excess and width != "exact" else ""
        if above and len(excess) > 1:
            above += f" ± {statistics.stdev(excess) / len(excess) ** 0.5:.2f}"
        loss = f"{statistics.fmean(losses.values()):.4f}"
        lines.append([form, arm, width, loss, above, str(len(losses))])
    return markdown_table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--model", choices=STEPS, action="append", help="(default: both)")
    parser.add_argument("--seeds", nargs="+", type=int, help="(default: 0 to 2 for text, 0 to 4 for digits)")
    parser.add_argument("--copies", nargs="+", choices=COPIES, default=list(COPIES))
    parser.add_argument("--widths", nargs="+", choices=WIDTHS, default=WIDTHS)
    parser.add_argument("--gradients", nargs="+", default=GRADIENTS, help="arms, as for the demo")
    arguments = parser.parse_args()
    for model in arguments.model or STEPS:
        if arguments.command == "run":
            seeds = arguments.seeds or SEEDS[model]
            run(model, seeds, arguments.copies, arguments.widths, arguments.gradients)
        else:
            print(f"{model}\n\n{table(model)}\n")
    if arguments.command == "report":
        print("± is the standard error of the mean difference over seeds.")


if __name__ == "__main__":
    main()
