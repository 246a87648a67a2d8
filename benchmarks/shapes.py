"""Gradient sets of known models, in the order in which a backward pass fills a bucket, last layer first."""

import math

from powersgd_triton.planning import bucket_caps
from powersgd_triton.planning.models import Shapes, gpt2, llama, resnet, vision_transformer

CPU_GRADIENT_SETS: dict[str, Shapes] = {
    "gpt2-like-15M": gpt2(layers=4, width=512, vocabulary=4096, context=128),
    "gpt2-like-35M": gpt2(layers=4, width=768, vocabulary=8192, context=1024),
}

GPU_GRADIENT_SETS: dict[str, Shapes] = {
    "resnet-50": resnet((3, 4, 6, 3)),
    "gpt2-124M": gpt2(layers=12, width=768, vocabulary=50257, context=1024),
    "vit-l-16": vision_transformer(layers=24, width=1024, patch=16),
    "llama-7b-layer-x4": llama(layers=4, width=4096, hidden=11008),
}

_GPT2 = {str(number): shape for number, shape in enumerate(GPU_GRADIENT_SETS["gpt2-124M"])}
ONE_BUCKET: dict[str, Shapes] = {"gpt2-124M, one bucket": list(bucket_caps.ddp_buckets(_GPT2)[1].values())}
"""The second bucket that DDP makes. Most are like it. ``bucket_costs.py`` predicts what its kernels take."""

SINGLE_MATRICES: dict[str, Shapes] = {"matrix-4096": [(4096, 4096)]}
"""For the kernels alone: one matrix of 64 MiB in fp32."""

SMALL_GRADIENT_SETS: dict[str, Shapes] = {"demo": gpt2(layers=4, width=128, vocabulary=96, context=128)}
"""About the demo's text model, with 0.8 M parameters: the number of operations matters more than memory."""

TINY_GRADIENT_SETS: dict[str, Shapes] = {"tiny": [(24, 20), (20,), (16, 2, 3, 3)]}
"""For dry runs in the interpreter."""

GRADIENT_SETS: dict[str, Shapes] = (
    CPU_GRADIENT_SETS | GPU_GRADIENT_SETS | ONE_BUCKET | SINGLE_MATRICES | SMALL_GRADIENT_SETS | TINY_GRADIENT_SETS
)


def count_parameters(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
