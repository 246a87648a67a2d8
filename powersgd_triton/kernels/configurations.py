"""Launch parameters by architecture, kernel and rank."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        rows, columns: a tile of a matrix.
        panel: columns of the factors that one program multiplies by, at least 16 for tl.dot.
        num_warps, num_stages: Triton's.
        precision: of products of fp32 values.
    """

    rows: int
    columns: int
    panel: int
    num_warps: int
    num_stages: int
    precision: str


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The launches of a bucket whose largest rank is at most some bound.

    ``gram`` and ``orthogonalize`` take blocks of ``rows`` of a factor; their columns are the panel.
    """

    compensate_project: Launch
    backproject: Launch
    reconstruct: Launch
    gram: Launch
    orthogonalize: Launch


def _configuration(panel: int, precision: str) -> Configuration:
    return Configuration(
        compensate_project=Launch(64, 64, panel, 8, 2, precision),
        backproject=Launch(64, 64, panel, 4, 2, precision),
        reconstruct=Launch(64, 64, panel, 4, 2, precision),
        gram=Launch(64, panel, panel, 4, 2, precision),
        orthogonalize=Launch(64, panel, panel, 4, 1, precision),
    )


NVIDIA = {16: _configuration(16, "tf32x3"), 256: _configuration(32, "tf32x3")}
AMD = {16: _configuration(16, "ieee"), 256: _configuration(32, "ieee")}
TABLES = {"sm_80": NVIDIA, "sm_90": NVIDIA, "sm_100": NVIDIA, "gfx942": AMD}
"""By architecture, then by the largest rank that a configuration is for. The first one serves unlisted architectures."""


def architecture(device: torch.device) -> str:
    """Name of a device's architecture; the interpreter's is NVIDIA's."""
    if device.type != "cuda":
        return "sm_80"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def select_configuration(arch: str, rank: int) -> Configuration:
    """The launches for a bucket of matrices of at most ``rank`` on an architecture."""
    table = TABLES.get(arch, AMD if arch.startswith("gfx") else NVIDIA)
    return table[min(bound for bound in table if bound >= rank)]
