"""The encoder-decoder families of Transformers 5.23.0, by the qualified name of their layer class.

The self-attention of T5's first layer computes the position bias of all layers, so it is shared. Other layers pass on
the bias that they receive, and use the part for their heads.
"""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers


def _attention(name: str, layer: str, body: str, cache: str, *, when: tuple[str, bool]) -> Branch:
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
            caches=(f"past_key_values.{cache}",),
            by_head=("position_bias",),
        ),
        handed_on=("position_bias",),
        when=(when,),
    )


def _mlp(layer: str, *, when: tuple[str, bool]) -> Branch:
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
        when=(when,),
    )


_MAKES_NO_BIAS = ("layer.0.SelfAttention.has_relative_attention_bias", False)
_T5 = (
    _attention("attention", "layer.0", "SelfAttention", "self_attention_cache", when=_MAKES_NO_BIAS),
    _attention("cross_attention", "layer.1", "EncDecAttention", "cross_attention_cache", when=("is_decoder", True)),
    _mlp("layer.1", when=("is_decoder", False)),
    _mlp("layer.2", when=("is_decoder", True)),
)

ENCODER_DECODERS: dict[str, tuple[Branch, ...]] = {
    "transformers.models.mt5.modeling_mt5.MT5Block": _T5,
    "transformers.models.t5.modeling_t5.T5Block": _T5,
}
