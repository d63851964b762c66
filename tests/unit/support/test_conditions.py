"""Questions to a config: what applies, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.support import conditions
from sdp_deepspeed.support.rows import Condition

BF16 = {"bf16": {"enabled": True}}
OVERLAP = {"zero_optimization": {"stage": 1, "overlap_comm": True}}


@pytest.mark.parametrize(
    ("condition", "yes", "no"),
    [
        (conditions.equals(3, 4), [3, 4], [2, None]),
        (conditions.differs(1), [2, "1"], [1, 1.0, None]),
        (conditions.is_on, [True, 1, {"a": 1}], [False, 0, None, {}]),
        (conditions.is_enabled, [{"enabled": True}, True], [{"enabled": False}, {}, {"size": 2}, False, None]),
        (conditions.is_present, [{}, False, 0], [None]),
        (conditions.is_above_one, [2], [1, 0, None, "2"]),
        (conditions.has_device("cpu"), [{"device": "cpu"}], [{"device": "nvme"}, {"device": "none"}, {}, None, "cpu"]),
        (conditions.is_unknown_optimizer, ["MuAdam", "AdamX"], ["adamw", "AdamW", "muon", None]),
        (
            conditions.autocasts_below_bf16,
            [{"enabled": True}, {"enabled": True, "dtype": "torch.float16"}, True],
            [None],
        ),
        (
            conditions.autocasts_below_bf16,
            [{"enabled": True, "dtype": "fp16"}],
            [{"enabled": True, "dtype": "bfloat16"}],
        ),
    ],
)
def test_questions_about_a_value(condition: Condition, yes: list[Any], no: list[Any]) -> None:
    assert all(condition(value, {}) for value in yes)
    assert not any(condition(value, {}) for value in no)


@pytest.mark.parametrize(
    ("condition", "value", "yes", "no"),
    [
        (conditions.at_stages(conditions.is_on, 0, 1), True, {}, {"zero_optimization": {"stage": 2}}),
        (conditions.scales_backward_branches, "coverage", {KEY: {"regime": "backward"}}, {KEY: {"regime": "forward"}}),
        (
            conditions.fetches_in_backward_regime,
            "prefetch",
            {KEY: {"regime": "backward"}},
            {KEY: {"regime": "forward"}},
        ),
        (conditions.sums_in_fp32, "float32", BF16, {}),
        (conditions.sums_in_third_dtype, "fp16", BF16, {"fp16": {"enabled": True}}),
        (conditions.overlaps_unmanaged, False, OVERLAP, {}),
        (conditions.is_unknown_optimizer, "MuAdam", {}, {KEY: {"allow_optimizer": True}}),
        (conditions.clips_without_norm, False, {"gradient_clipping": 0.5}, {"gradient_clipping": 0}),
    ],
)
def test_questions_about_the_rest_too(
    condition: Condition, value: Any, yes: dict[str, Any], no: dict[str, Any]
) -> None:
    assert condition(value, yes)
    assert not condition(value, no)


def test_deepspeed_clips_by_one_unless_it_is_told_otherwise() -> None:
    assert conditions.clips_without_norm(False, {})
    constants = pytest.importorskip("deepspeed.runtime.constants")
    assert constants.GRADIENT_CLIPPING_DEFAULT == conditions.DEFAULT_CLIPPING
