"""What is a matrix: the view of a tensor as matrices, the rank of their approximation, and its bytes."""

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from powersgd_triton.config import SPARSE, PowerSGDConfig, whole_number
from powersgd_triton.layout.sparse_format import SparseFormat
from powersgd_triton.layout.wire_format import FORMATS, QUANTIZED, WireFormat

Tensors = Mapping[str, Sequence[int]]
"""{name: shape}."""

MOST_FACTORS = 2
"""How many times the elements of dim 0 × the rest's factors the factors of a batch may have.

The gradient of an expert has a low rank, and those of several experts side by side have not, so that factors of each
expert keep more of it for their bytes. The factors of one kernel of a convolution would have many times the elements.
"""


class Size(NamedTuple):
    """A tensor's elements, in their order, as ``batch`` matrices of n × m. A rank of 0 means not compressed."""

    n: int
    m: int
    rank: int = 0
    batch: int = 1

    @property
    def rows(self) -> int:
        return self.batch * self.n


def matrix_size(shape: Sequence[int], config: PowerSGDConfig, name: str = "") -> Size:
    """Return the view of a tensor as matrices, of rank 0. ValueError: ``config.matrices`` returned no such view.

    A tensor [..., n, m] is a batch of n × m matrices, such as the experts of a layer, or one matrix, dim 0 × the rest,
    such as a convolution (Vogels et al. 2019, section 3); see ``MOST_FACTORS``. Fewer than two dimensions give one row.
    """
    if len(shape) < 2:
        return Size(1, math.prod(shape))
    given = config.matrices(name, tuple(shape)) if config.matrices and 0 not in shape else None
    if given is not None:
        view = given if isinstance(given, (tuple, list)) and all(type(each) is int for each in given) else ()
        if len(view) != 3 or min(view) < 1 or math.prod(view) != math.prod(shape):
            expected = f"(batch, rows, columns) with {math.prod(shape)} elements, as {tuple(shape)}, or None"
            raise ValueError(f"matrices must return {expected}, for {name!r}; got {given!r}")
        batch, n, m = view
        return Size(n, m, batch=batch)
    one, several = Size(shape[0], math.prod(shape[1:])), Size(shape[-2], shape[-1], batch=math.prod(shape[:-2]))
    return several if several.batch * (several.n + several.m) <= MOST_FACTORS * (one.n + one.m) else one


def compressed_rank(shape: Sequence[int], config: PowerSGDConfig, name: str = "") -> int:
    """Return the rank r = min(rank, n, m) of the approximation of a tensor's matrices, or 0 for a bypass tensor.

    A tensor is compressed only if the bytes of its factors in a step, scales included, times ``min_compression_rate``
    are fewer than those of the whole tensor, 4 bytes an element if it is averaged exactly. If ranks are planned, the
    result is the largest rank that qualifies. A rank function gets the tensor's ``name``; TypeError or ValueError: it
    returned no count.
    """
    if len(shape) < 2 or config.quantize is not None:
        return 0
    size = matrix_size(shape, config, name)

    def is_worth_it(r: int) -> bool:
        return _bytes(size._replace(rank=r), config) * config.min_compression_rate < _bytes(size, config)

    if config.planned:
        assert config.max_rank is not None
        # Bytes grow with the rank.
        ranks = range(1, min(size.n, size.m, config.max_rank) + 1)
        return bisect.bisect(ranks, False, key=lambda r: not is_worth_it(r))
    wanted = config.rank
    if callable(wanted):
        wanted = whole_number(f"the rank of {name!r}, {tuple(shape)},", wanted(name, tuple(shape)))
    assert wanted is not None
    r = min(wanted, size.n, size.m)
    return r if is_worth_it(r) else 0


def sizes(shapes: Tensors, config: PowerSGDConfig) -> dict[str, Size]:
    """Return {name: size} of tensors {name: shape}."""
    return {
        name: matrix_size(shape, config, name)._replace(rank=compressed_rank(shape, config, name))
        for name, shape in shapes.items()
    }


def tensor_bytes(shape: Sequence[int], rank: int, config: PowerSGDConfig, name: str = "") -> float:
    """Return the bytes of a tensor in an average step: as factors with their scales, or as a whole if the rank is 0."""
    return _bytes(matrix_size(shape, config, name)._replace(rank=rank), config)


def _bytes(size: Size, config: PowerSGDConfig) -> float:
    numel = size.rows * size.m
    if size.rank:
        width = wire_format(config)
        of_each = width.factor_bytes(size.n, size.rank) + width.factor_bytes(size.m, size.rank)
        return size.batch * of_each * factors_sent(config)
    form = flat_format(config)
    return 4 * numel if form is None else form.bytes_each * numel


def wire_format(config: PowerSGDConfig) -> WireFormat:
    """Return the format of factors in messages."""
    return FORMATS[str(config.wire_dtype or "float32")]


def flat_format(config: PowerSGDConfig) -> WireFormat | SparseFormat | None:
    """Return the format of tensors that are sent whole. None if they are averaged exactly."""
    if config.quantize == SPARSE:
        assert isinstance(config.compression, (int, float))
        return SparseFormat.of(config.compression)
    return QUANTIZED[config.whole_format] if config.whole_format else None


def factors_sent(config: PowerSGDConfig) -> float:
    """Return how often an average step sends both factors of a matrix."""
    return config.iterations * (0.5 if config.algorithm == "alternating" else 1.0)


def products(config: PowerSGDConfig, iteration: int, repetition: int) -> tuple[bool, bool]:
    """Return (whether P = M Q, whether Q = Mᵀ P̂ is computed and sent) in a repetition of a step."""
    if config.algorithm == "standard":
        return True, True
    # They take turns, from the first compressed step on.
    turn = (iteration - config.start_iter) * config.iterations + repetition
    return turn % 2 == 1, turn % 2 == 0
