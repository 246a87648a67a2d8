"""What a step costs the host: counted on kernels that are compiled for a GPU, without one."""

from __future__ import annotations

import json
from typing import Any

from tests.support.programs import output_of

MOST_LAUNCHES, LAUNCHES_OF_NARROW_MESSAGES = 14, 6
MOST_KERNELS = 12
MODEL = "gpt2-like-35M"
"""Of five buckets. Those of larger models are alike."""


def test_steps_launch_few_kernels_that_all_buckets_and_ranks_share():
    options = ["--json", "--gradients", MODEL, "--rank", "4", "--steps", "0"]
    found: list[dict[str, Any]] = json.loads(output_of("benchmarks/host_time.py", *options, TRITON_INTERPRET=None))
    rows = {row["ranks"]: row for row in found}
    assert rows["4"]["launches a bucket"] <= MOST_LAUNCHES + LAUNCHES_OF_NARROW_MESSAGES
    assert rows["4"]["kernels compiled"] <= MOST_KERNELS
    # Gradients lie in flat buffers, in every step at another place.
    assert all(row["compiled later"] == row["uploads"] == 0 for row in found)
    # The plan for a smaller budget comes second, with ranks that fit one block of columns.
    assert [row["kernels compiled"] > 0 for name, row in rows.items() if "planned" in name] == [True, False]
