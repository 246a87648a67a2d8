"""What the tests of several frameworks ask."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checks import same_bits
from tests.support.small import logged, warnings


def refused(error: type[Exception], call: Any, *args: Any, **options: Any) -> str:
    """Message of the error that a call raises."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)


def warnings_of(call: Any) -> list[str]:
    """What the package warns of in a call."""
    with logged("powersgd_triton") as messages:
        call()
    return warnings(messages)


def exported(engine: Any, export: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """An export has the optimizer's parameters, from which DeepSpeed's model differs, and leaves the model."""
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    with engine.powersgd.exact_parameters():
        exact = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    assert not same_bits(exact, before)
    written = export()
    assert written
    assert all(torch.equal(exact[name], tensor) for name, tensor in written.items())
    assert same_bits(engine.module.state_dict(), before)


def remove_states(folder: Path, pattern: str = "powersgd*") -> None:
    """Take what the compression saved out of a folder that all workers know. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        found = [*folder.rglob(pattern)]
        assert found
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    dist.barrier()


def largest(errors: Iterable[torch.Tensor]) -> float:
    return max(error.abs().max().item() for error in errors)
