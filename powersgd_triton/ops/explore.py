"""Exploration: a look at the directions that no column of a basis sees.

A warm-started basis holds the directions that were largest in the last steps. What a gradient has in other directions
waits in the error. If noise is larger, the basis holds noise in every step, and what waits is never seen, since
products are exactly zero in directions that are orthogonal to the basis. (Xie, Chen, Yuan: "From PowerSGD to
PowerSGD+", arXiv:2509.11254, give such a gradient. They replace the basis by singular vectors from time to time.)

Every ``config.explore_every`` steps, the last column of a matrix's basis is replaced by a random direction that is
orthogonal to the whole basis, plus CARRY times the old column. The next product sees what waits there, and sends a part
of it. The power iteration then keeps the larger of the two. Nothing more is sent.
"""

import ctypes

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.constants import CARRY, OTHER_KEY, SMALLEST_REST
from powersgd_triton.ops.blocks import product
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.host import fields, library
from powersgd_triton.ops.orthogonalize import random_directions


class _Bases(ctypes.Structure):
    _fields_ = fields(void_p="bases keys", int64="count m r every step other", double="carry least")


def explores(config: PowerSGDConfig, repetition: int) -> bool:
    """Return whether a repetition of a step may explore: the first one, if its basis is used again and errors wait.

    The alternating algorithm does not explore. It projects from both sides, so what waits always reaches both bases.
    """
    warm = config.algorithm == "standard" and config.warm_start
    return warm and bool(config.error_feedback) and config.explore_every > 0 and repetition == 0


def explore(bucket: Bucket, step: int | Tensor, *, where: bool | Tensor) -> None:
    """Do what ``explore_reference`` does, on the CPU in C. Directions have the same bits, sums differ by rounding."""
    function = getattr(library(), "powersgd_explore", None)
    plain = bucket.basis.is_cpu and bucket.basis.dtype == torch.float32
    if function is None or not plain or where is not True or isinstance(step, Tensor):
        explore_reference(bucket, step, where=where)
        return
    numbers = bucket.config.explore_every, step, OTHER_KEY, CARRY, SMALLEST_REST
    bases = [
        _Bases(basis.data_ptr(), keys.data_ptr(), *basis.shape, *numbers)
        for group, keys, basis in zip(bucket.layout.groups, bucket.keys, bucket.right(bucket.basis), strict=True)
        if group.rank < min(group.n, group.m)
    ]
    function((_Bases * len(bases))(*bases), len(bases))


def explore_reference(bucket: Bucket, step: int | Tensor, *, where: bool | Tensor) -> None:
    """Replace the last columns of the right bases of those matrices whose turn it is in step ``step``.

    A matrix of full rank has nothing to explore. The turns depend on the keys, so that they are spread over the steps.
    If the scalar ``where`` is False, the bases stay as they are.
    """
    every = bucket.config.explore_every
    for group, keys, bases in zip(bucket.layout.groups, bucket.keys, bucket.right(bucket.basis), strict=True):
        if group.rank >= min(group.n, group.m):
            continue
        turn = (keys + step) % every == 0
        # Few matrices have their turn in a step. On other devices the host would have to wait to know which.
        some = turn.nonzero().squeeze(1) if keys.is_cpu else slice(None)
        directions, own = random_directions(keys[some] + OTHER_KEY, step, 1, group.m).to(bases.dtype), bases[some]
        inside = product(product(directions, own), own.transpose(1, 2))
        directions, old = directions.squeeze(1), own[..., -1]
        rest = directions - inside.squeeze(1)
        size, left = directions.square().sum(1, keepdim=True), rest.square().sum(1, keepdim=True)
        explored = (rest + CARRY * old) * (left + CARRY**2).rsqrt()
        chosen = where & turn[some].unsqueeze(1) & (left > SMALLEST_REST * size)
        bases[some, :, -1] = torch.where(chosen, explored, old)
