"""Where the Triton kernels run, and whether C does. ``tests/conftest.py`` chooses before anything imports triton."""

import os
import sys

from powersgd_triton.ops import host

EMULATED = "tests.ptx.emulator" in sys.modules
"""Whether their PTX is executed on the CPU (``make ptx``), with the rounding of a GPU."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not EMULATED
"""Whether in Triton's interpreter, on the CPU."""
if os.environ.get("WITHOUT_C"):
    # As if there had been no compiler when the package was installed.
    host.INTERFACE = "none"
