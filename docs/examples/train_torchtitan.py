"""Train torchtitan's llama3 debug model with compressed gradients: torchrun --nproc-per-node 4 train_torchtitan.py."""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.llama3 import model_registry

from powersgd_triton import attach

parallel_dims.device_type = "cpu"  # leave this out on GPUs


def causal(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """Attention on CPUs. Leave it out on GPUs, where torchtitan's flex attention runs."""
    heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def parallelize(model: nn.Module, **settings: object) -> nn.Module:
    """Torchtitan's own function for llama3, and one line more."""
    global powersgd
    model = spec.parallelize_fn(model, **settings)
    powersgd = attach(model, rank=8)
    return model


dist.init_process_group("gloo")
replicas, shards = map(int, sys.argv[1:] or (2, 2))
spec = model_registry("debugmodel")
parallelism = ParallelismConfig(
    data_parallel_replicate_degree=replicas, data_parallel_shard_degree=shards, spmd_backend="partial_dtensor"
)
spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
with torch.device("meta"):
    model = spec.model.build()
for layer in model.layers.values():
    layer.attention.inner_attention.forward = causal
model = parallelize(
    model,
    parallel_dims=ParallelDims(
        dp_replicate=replicas,
        dp_shard=shards,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=replicas * shards,
        spmd_backend="partial_dtensor",
    ),
    training=TrainingConfig(mixed_precision_param="float32"),
    parallelism=parallelism,
    compile_config=CompileConfig(enable=False),
    ac_config=None,
    dump_folder=".",
)
for module in model.modules():
    if hasattr(module, "set_force_sum_reduction_for_comms"):
        module.set_force_sum_reduction_for_comms(True)  # for gloo, which cannot multiply while it sums
model.to_empty(device="cpu")
torch.manual_seed(0)
with torch.no_grad():
    model.init_weights(buffer_device="cpu")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())  # each worker draws other tokens
for step in range(31):
    tokens = (torch.arange(64) + torch.randint(1900, (1,))).unsqueeze(0)
    logits = model(tokens, positions=torch.arange(64).unsqueeze(0))
    # torchtitan sums gradients, so each worker's loss is divided by the number of workers.
    loss = F.cross_entropy(logits.float().flatten(0, 1)[:-1], tokens.flatten()[1:]) / dist.get_world_size()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.1f}")
powersgd.check_replicas()
powersgd.save("checkpoint")
dist.destroy_process_group()
