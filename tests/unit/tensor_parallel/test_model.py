"""What a division of the model says of its branches."""

from __future__ import annotations

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.tensor_parallel.model import _without_heads_of_config
from tests.helpers.models import family


def test_a_config_does_not_say_whose_heads_it_counts() -> None:
    """Of a model that its author divided: those of the dense model, or of a shard."""
    attention, mlp, *_ = locate_branches(family("llama"))
    divided = {"model.layers.0.self_attn.q_proj.weight": None, "model.layers.0.mlp.up_proj.weight": None}
    assert "does not say whether it counts" in _without_heads_of_config(attention, divided).uncuttable_reason
    assert _without_heads_of_config(mlp, divided) == mlp
    assert _without_heads_of_config(attention, {}) == attention
