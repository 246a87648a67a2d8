"""Gradient sets of known models: shapes in the order in which a backward pass fills a bucket."""

from __future__ import annotations

Shapes = list[tuple[int, ...]]


def gpt2(layers: int, width: int, vocabulary: int, context: int) -> Shapes:
    """GPT-2's parameters (Radford et al. 2019) with torch.nn.Linear's orientation."""
    block: Shapes = [
        *[(width, 4 * width), (width,), (4 * width, width), (4 * width,)],
        *[(width,), (width,), (width, width), (width,), (3 * width, width), (3 * width,), (width,), (width,)],
    ]
    return [(width,), (width,), *(block * layers), (context, width), (vocabulary, width)]


GRADIENT_SETS: dict[str, Shapes] = {
    "gpt2-like-35M": gpt2(layers=4, width=768, vocabulary=8192, context=1024),
    "gpt2-like-53M": gpt2(layers=2, width=768, vocabulary=50257, context=1024),
}
