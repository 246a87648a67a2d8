"""Where the Triton kernels run. ``tests/conftest.py`` chooses it before anything imports triton."""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether in Triton's interpreter, on the CPU."""
