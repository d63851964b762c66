"""The encoder-decoder families of Transformers (read in 5.23.0), by the qualified name of their layer class.

The first layer's self-attention of T5 makes the position bias of all layers: it is in no unit. What makes no bias of
its own hands on the one that it got, and uses what that has for its heads.
"""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch, Cut, Form, InnerLayers


def _attention(name: str, layer: str, body: str) -> Branch:
    return Branch(
        name,
        norm=f"{layer}.layer_norm",
        body=f"{layer}.{body}",
        after=(f"{layer}.dropout",),
        num_outputs=3,
        inner=InnerLayers(
            (Cut("q", 0), Cut("k", 0), Cut("v", 0), Cut("o", 1, is_output=True)),
            heads="n_heads",
            scaled=("n_heads", "inner_dim"),
            caches=("past_key_values",),
            by_head=("position_bias",),
        ),
        handed_on=("position_bias",),
    )


def _mlp(layer: str) -> Branch:
    return Branch(
        "mlp",
        norm=f"{layer}.layer_norm",
        body=f"{layer}.DenseReluDense",
        after=(f"{layer}.dropout",),
        inner=InnerLayers(
            (
                *(Cut(name, 0, optional=True) for name in ("wi", "wi_0", "wi_1")),
                Cut("wo", 1, is_output=True),
            )
        ),
    )


_SELF_ATTENTION = _attention("attention", "layer.0", "SelfAttention")
_OF_DECODER = (_attention("cross_attention", "layer.1", "EncDecAttention"), _mlp("layer.2"))
_OF_ENCODER = (_mlp("layer.1"),)
_T5 = tuple(
    Form(
        others if makes_bias else (_SELF_ATTENTION, *others),
        {"is_decoder": is_decoder, "layer.0.SelfAttention.has_relative_attention_bias": makes_bias},
    )
    for is_decoder, others in ((False, _OF_ENCODER), (True, _OF_DECODER))
    for makes_bias in (False, True)
)

ENCODER_DECODERS: dict[str, tuple[Branch, ...] | tuple[Form, ...]] = {
    "transformers.models.mt5.modeling_mt5.MT5Block": _T5,
    "transformers.models.t5.modeling_t5.T5Block": _T5,
}
