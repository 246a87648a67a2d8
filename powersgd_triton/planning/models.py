"""Shapes of the gradients of known models, in the order in which a backward pass computes them, last layer first."""

Shapes = list[tuple[int, ...]]


def gpt2(layers: int, width: int, vocabulary: int, context: int) -> Shapes:
    """GPT-2's parameters (Radford et al. 2019) with torch.nn.Linear's orientation; the head is the embedding."""
    block: Shapes = [
        *[(width, 4 * width), (width,), (4 * width, width), (4 * width,)],
        *[(width,), (width,), (width, width), (width,), (3 * width, width), (3 * width,), (width,), (width,)],
    ]
    return [(width,), (width,), *(block * layers), (context, width), (vocabulary, width)]


def resnet(blocks: tuple[int, ...], classes: int = 1000) -> Shapes:
    """ResNet with bottleneck blocks (He et al. 2015), as torchvision's; (3, 4, 6, 3) is ResNet-50."""

    def convolution(out: int, into: int, size: int) -> Shapes:
        return [(out, into, size, size), (out,), (out,)]  # the last two are the batch norm's

    forward = convolution(64, 3, 7)
    into = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for index in range(count):
            forward += convolution(width, into, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            if index == 0:
                forward += convolution(4 * width, into, 1)
            into = 4 * width
    forward += [(classes, into), (classes,)]
    return forward[::-1]


def vision_transformer(layers: int, width: int, patch: int, image: int = 224, classes: int = 1000) -> Shapes:
    """ViT (Dosovitskiy et al. 2020), as torchvision's; 24 layers of width 1024 and patches of 16 are ViT-L/16."""
    tokens = (image // patch) ** 2 + 1
    layer: Shapes = [
        *[(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)],
        *[(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)],
    ]
    forward: Shapes = [
        *[(1, 1, width), (width, 3, patch, patch), (width,), (1, tokens, width)],
        *(layer * layers),
        *[(width,), (width,), (classes, width), (classes,)],
    ]
    return forward[::-1]


def llama(layers: int, width: int, hidden: int) -> Shapes:
    """Layers of Llama (Touvron et al. 2023) without embeddings: four projections, a gated MLP, two norms."""
    layer: Shapes = [*[(width, width)] * 4, *[(hidden, width), (hidden, width), (width, hidden)], *[(width,), (width,)]]
    return layer[::-1] * layers


def mixture(layers: int, width: int, hidden: int, experts: int, heads: tuple[int, int], head: int = 128) -> Shapes:
    """Layers of Llama whose MLP is so many experts, as transformers 5 holds them, without embeddings.

    ``heads`` are those of queries and of keys, ``head`` is the width of each, and ``hidden`` that of an expert, whose
    two input projections are one.
    """
    queries, keys = (count * head for count in heads)
    layer: Shapes = [
        *[(queries, width), (keys, width), (keys, width), (width, queries)],
        *[(experts, width), (experts, 2 * hidden, width), (experts, width, hidden), (width,), (width,)],
    ]
    return layer[::-1] * layers


MODELS: dict[str, Shapes] = {
    "gpt2": gpt2(layers=12, width=768, vocabulary=50257, context=1024),
    "gpt2-xl": gpt2(layers=48, width=1600, vocabulary=50257, context=1024),
    "llama-7b": [(32000, 4096), (4096,), *llama(layers=32, width=4096, hidden=11008), (32000, 4096)],
    "mixtral-8x7b": [
        *[(32000, 4096), (4096,)],
        *mixture(layers=32, width=4096, hidden=14336, experts=8, heads=(32, 8)),
        (32000, 4096),
    ],
    "qwen3-30b-a3b": [
        *[(151936, 2048), (2048,)],
        *mixture(layers=48, width=2048, hidden=768, experts=128, heads=(32, 4)),
        (151936, 2048),
    ],
    "resnet-50": resnet((3, 4, 6, 3)),
    "vit-l-16": vision_transformer(layers=24, width=1024, patch=16),
}
"""{name: shapes} of whole models."""
