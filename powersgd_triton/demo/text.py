"""The text: sources of Python's standard library and the topics of its help, one token for each byte."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCABULARY = 128
MAX_BYTES = 6_000_000
TRAINING_SHARE = 0.95


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens (ASCII codes, int64) for training and for validation."""

    training: Tensor
    validation: Tensor


def read_corpus() -> Corpus:
    """Read the text, ordered by file name. All workers of one Python installation get the same text.

    Raises:
        RuntimeError: This Python installation lacks the sources of its library.
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
    return Corpus(tokens[:boundary], tokens[boundary:])


def sample_batch(tokens: Tensor, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random excerpts as (inputs, next tokens), both [size, context]."""
    starts = torch.randint(len(tokens) - context, (size, 1), generator=generator)
    excerpts = tokens[starts + torch.arange(context + 1)]
    return excerpts[:, :-1], excerpts[:, 1:]
