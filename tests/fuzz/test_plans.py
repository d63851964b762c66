"""Plans that somebody edited: used as they are, or refused with the place; never another error, never without end."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from tests.helpers.hostile import json_values, mutated, refusal_of
from tests.helpers.models import llama
from tests.helpers.properties import fuzzed


@cache
def plan_of(strategy: str) -> Plan:
    block = parse({KEY: {"holders": 1, "strategy": strategy}})
    assert block is not None
    return plan_model(llama(), block, 2)[0]


PLANS = st.sampled_from(["block", "neuron"]).map(lambda strategy: plan_of(strategy).to_json())


def without_hash(plan: dict[str, Any]) -> dict[str, Any]:
    """The hash would refuse most changes before anything else looks at them."""
    return {key: value for key, value in plan.items() if key != "hash"}


@fuzzed()
@given(mutated(PLANS) | mutated(PLANS.map(without_hash)) | json_values())
def test_content(content: Any) -> None:
    refusal = refusal_of(lambda: Plan.from_json(content))
    if refusal is not None:
        assert refusal.startswith("plan")
        return
    plan = Plan.from_json(content)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.table()
