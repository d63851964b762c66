"""How many samples a batch has, as programs hand it over; the rest is in tests/ranks/engine/test_schedule.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdp_deepspeed.engine.schedule_calls import num_rows

IDS, LENGTHS = torch.zeros(4, 8), torch.zeros(9)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([IDS], 4),
        ([{"input_ids": IDS, "labels": IDS}], 4),
        ([(LENGTHS, IDS), None, "text"], 4),
        ([LENGTHS, 3.0], 0),
        ([{"images": [torch.zeros(5, 3, 2, 2)], "ids": IDS}], 5),
        ([], 0),
    ],
)
def test_samples_of_a_batch(given: Any, expected: int) -> None:
    assert num_rows(given) == expected
