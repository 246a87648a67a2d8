"""The demo's model and text: a character-level GPT, of 0.8 M parameters at its default width, and sources of Python."""

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, CONTEXT = 4, 128, 4, 64
VOCABULARY = 128
MAX_BYTES = 6_000_000
TRAINING_SHARE = 0.95


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a perceptron, each with normalization before it and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width))
        hidden = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.perceptron = nn.Sequential(nn.LayerNorm(width), *hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.perceptron(x)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predicts the next token at each of up to ``CONTEXT`` positions."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.empty(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to logits [batch, length, VOCABULARY]."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def read_corpus() -> tuple[Tensor, Tensor]:
    """Return tokens (ASCII codes, int64) for training and for validation.

    They are the sources of Python's standard library and the topics of its help, ordered by file name. All workers of
    one Python installation get the same text. RuntimeError: It lacks the sources of its library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    texts = {file.stem: file.read_bytes() for file in library.glob("*.py")}
    # Use the topics as pydoc shows them instead of the source with their string literals.
    texts["pydoc_data"] = "\n".join(topic for _, topic in sorted(topics.items())).encode()
    text = b"".join(text for _, text in sorted(texts.items()))[:MAX_BYTES]
    if len(text) < 1_000_000:
        raise RuntimeError(f"expected at least 1 MB of Python sources in the standard library; found {len(text)} bytes")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp_(max=VOCABULARY - 1)
    boundary = int(len(tokens) * TRAINING_SHARE)
    return tokens[:boundary], tokens[boundary:]


def sample_batch(tokens: Tensor, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random excerpts as (inputs, next tokens), both [size, context]."""
    starts = torch.randint(len(tokens) - context, (size, 1), generator=generator)
    excerpts = tokens[starts + torch.arange(context + 1)]
    return excerpts[:, :-1], excerpts[:, 1:]
