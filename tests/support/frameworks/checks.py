"""What the tests of several frameworks ask."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch


def refused(error: type[Exception], call: Any, *args: Any, **options: Any) -> str:
    """Message of the error that a call raises."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)


def warnings_of(call: Any) -> list[str]:
    """What the package logs in a call."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("powersgd_triton")
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return records


def exported(engine: Any, export: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, bool]:
    """Whether an export has the optimizer's parameters, from which DeepSpeed's model differs, and leaves the model."""
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    with engine.powersgd.exact_parameters():
        exact = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    written = export()
    after = engine.module.state_dict()
    return {
        "differs": any(not torch.equal(exact[name], tensor) for name, tensor in before.items()),
        "exact": all(torch.equal(exact[name], tensor) for name, tensor in written.items()) and bool(written),
        "left": all(torch.equal(after[name], tensor) for name, tensor in before.items()),
    }


def largest(errors: Iterable[torch.Tensor]) -> float:
    return max(error.abs().max().item() for error in errors)
