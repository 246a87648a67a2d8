"""DeepSpeed: run a training program with compression; see ``runner``."""

import sys

from powersgd_triton.integrations.deepspeed.runner import main

main(sys.argv[1:])
