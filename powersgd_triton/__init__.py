"""PowerSGD gradient compression (Vogels et al. 2019, arXiv:1905.13727) for training on slow links."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powersgd_triton.comm.control import DisagreementError
    from powersgd_triton.compressor import Compressed, Compressor
    from powersgd_triton.config import PowerSGDConfig
    from powersgd_triton.core.saved_state import LoadReport
    from powersgd_triton.integrations.attach import attach

__all__ = ["Compressed", "Compressor", "DisagreementError", "LoadReport", "PowerSGDConfig", "attach"]
__version__ = "0.2.0"

_MODULES = {
    "Compressed": "compressor",
    "Compressor": "compressor",
    "DisagreementError": "comm.control",
    "LoadReport": "core.saved_state",
    "PowerSGDConfig": "config",
    "attach": "integrations.attach",
}


def __getattr__(name: str) -> Any:
    # Imported when they are needed, because ``import torch`` imports this package for ``autoload``.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
