"""Falcon (Transformers 5.23.0): its config decides the position of norms, and the layout of the fused projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

_HEADS = InnerLayers(
    (Cut("query_key_value", 0), Cut("dense", 1, is_output=True)),
    heads="num_kv_heads",
    scaled=("num_heads", "num_kv_heads"),
)
_ATTENTION = Branch("attention", norm="input_layernorm", body="self_attention", num_outputs=2, inner=_HEADS)
_MLP = Branch(
    "mlp",
    norm="post_attention_layernorm",
    body="mlp",
    inner=InnerLayers((Cut("dense_h_to_4h", 0), Cut("dense_4h_to_h", 1, is_output=True))),
)
# A norm that both branches read is shared.
_NORMS: tuple[tuple[str | None, str | None, dict[str, Any]], ...] = (
    ("ln_attn", "ln_mlp", {"new_decoder_architecture": True, "parallel_attn": True, "num_ln_in_parallel_attn": 2}),
    (None, None, {"new_decoder_architecture": True, "parallel_attn": True, "num_ln_in_parallel_attn": 1}),
    (None, None, {"new_decoder_architecture": False, "parallel_attn": True}),
    ("input_layernorm", "post_attention_layernorm", {"new_decoder_architecture": False, "parallel_attn": False}),
)


def _uncut(reason: str) -> Branch:
    return replace(_ATTENTION, inner=None, uncut_reason=f"{reason} (Falcon)")


_HEAD_LAYOUTS: tuple[tuple[Branch, dict[str, Any]], ...] = (
    (_uncut("the attention mask contains the ALiBi slopes of all heads"), {"alibi": True}),
    (_ATTENTION, {"alibi": False, "new_decoder_architecture": True}),
    (
        _uncut("all query heads use one key/value head"),
        {"alibi": False, "new_decoder_architecture": False, "multi_query": True},
    ),
    (_ATTENTION, {"alibi": False, "new_decoder_architecture": False, "multi_query": False}),
)


def _when(conditions: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((f"config.{name}", value) for name, value in conditions.items())


FALCON: tuple[Branch, ...] = (
    *(
        replace(attention, norm=norm, when=_when({**norms, **layout}))
        for norm, _, norms in _NORMS
        for attention, layout in _HEAD_LAYOUTS
        if all(norms.get(name, value) == value for name, value in layout.items())
    ),
    *(replace(_MLP, norm=norm, when=_when(norms)) for _, norm, norms in _NORMS),
)
