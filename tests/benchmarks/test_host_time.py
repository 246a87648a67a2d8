"""What a step costs the host: counted on kernels that are compiled for a GPU, without one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.programs import output_of

MOST_LAUNCHES, LAUNCHES_OF_NARROW_MESSAGES = 14, 6
MOST_KERNELS = 12
MODEL = "gpt2-like-35M"
"""Of five buckets. Those of larger models are alike."""


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    options = ["--json", "--gradients", MODEL, "--rank", "4", "--steps", "0"]
    found = json.loads(output_of("benchmarks/host_time.py", *options, TRITON_INTERPRET=None))
    return {row["ranks"]: row for row in found}


def test_a_bucket_takes_few_launches_of_kernels_that_all_buckets_share(rows: dict[str, dict[str, Any]]):
    assert rows["4"]["launches a bucket"] <= MOST_LAUNCHES + LAUNCHES_OF_NARROW_MESSAGES
    assert rows["4"]["kernels compiled"] <= MOST_KERNELS


def test_nothing_is_compiled_or_uploaded_in_later_steps(rows: dict[str, dict[str, Any]]):
    """Gradients lie in flat buffers, in every step at another place."""
    for row in rows.values():
        assert row["compiled later"] == row["uploads"] == 0


def test_other_ranks_need_no_other_kernels(rows: dict[str, dict[str, Any]]):
    """The plan for a smaller budget comes second, with ranks that fit one block of columns."""
    planned = [row for name, row in rows.items() if "planned" in name]
    assert [row["kernels compiled"] > 0 for row in planned] == [True, False]
