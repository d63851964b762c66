"""How the table sees a config: paths, and one spelling of what DeepSpeed spells in two ways."""

from __future__ import annotations

from sdp_deepspeed.config import KEY
from sdp_deepspeed.support.rows import lookup, normalized


def test_paths_into_a_config() -> None:
    tree = {"a": {"b": {"c": 1}, "d": "auto", "e": None}, "f": False}
    assert lookup(tree, "a.b.c") == 1
    assert lookup(tree, "f") is False
    assert [lookup(tree, path) for path in ("a.d", "a.e", "a.x", "f.x", "x.y", "")] == [None] * 6


def test_old_spellings() -> None:
    assert normalized({"bfloat16": {"enabled": True}}, {})["bf16"] == {"enabled": True}
    assert normalized({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, {})["bf16"] == {"enabled": False}
    assert normalized({"zero_optimization": True}, {})["zero_optimization"] == {"stage": 1}
    zero = normalized({"zero_optimization": {"stage": 1, "cpu_offload": True}}, {})["zero_optimization"]
    assert zero == {"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}
    assert normalized({KEY: {"coverage": 0.5}}, {"coverage": 0.5, "seed": 0})[KEY] == {"coverage": 0.5, "seed": 0}
