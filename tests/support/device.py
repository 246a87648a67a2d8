"""Where the Triton kernels run. ``tests/conftest.py`` chooses it before anything imports triton."""

import os
import sys

EMULATED = "tests.ptx.emulator" in sys.modules
"""Whether their PTX is executed on the CPU (``make ptx``), with the rounding of a GPU."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not EMULATED
"""Whether in Triton's interpreter, on the CPU."""
