"""The encoder-decoder families of Transformers 5.23.0, by the qualified name of their layer class.

The self-attention of T5's first layer computes the position bias of all layers, so it is shared. Other layers pass on
the bias that they receive, and use the part for their heads.
"""

from __future__ import annotations

from dataclasses import replace

from sdp_deepspeed.architectures.branch import CROSS_ATTENTION, Branch, Cut, InnerLayers


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
            by_head=("position_bias",),
        ),
        extra_outputs=("position_bias",),
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
    _attention(CROSS_ATTENTION, "layer.1", "EncDecAttention", "cross_attention_cache", when=("is_decoder", True)),
    _mlp("layer.1", when=("is_decoder", False)),
    _mlp("layer.2", when=("is_decoder", True)),
)

_HEADS = InnerLayers(
    (Cut("q_proj", 0), Cut("k_proj", 0), Cut("v_proj", 0), Cut("out_proj", 1, is_output=True)),
    heads="num_heads",
    scaled=("num_heads",),
)
# Whisper's norms are before each branch. BART's are on the residual stream, and shared.
_WHISPER = (
    Branch(
        "attention",
        norm="self_attn_layer_norm",
        body="self_attn",
        num_outputs=2,
        inner=_HEADS,
    ),
    Branch(
        "mlp",
        norm="final_layer_norm",
        body=("fc1", "activation_fn", "fc2"),
        inner=InnerLayers((Cut("fc1", 0), Cut("fc2", 1, is_output=True))),
    ),
)
_CROSS_ATTENTION = Branch(
    CROSS_ATTENTION,
    norm="encoder_attn_layer_norm",
    body="encoder_attn",
    num_outputs=2,
    inner=_HEADS,
)
_BART = tuple(replace(branch, norm=None) for branch in _WHISPER)

ENCODER_DECODERS: dict[str, tuple[Branch, ...]] = {
    "transformers.models.bart.modeling_bart.BartEncoderLayer": _BART,
    "transformers.models.bart.modeling_bart.BartDecoderLayer": (
        _BART[0],
        replace(_CROSS_ATTENTION, norm=None),
        _BART[1],
    ),
    "transformers.models.mt5.modeling_mt5.MT5Block": _T5,
    "transformers.models.t5.modeling_t5.T5Block": _T5,
    "transformers.models.whisper.modeling_whisper.WhisperEncoderLayer": _WHISPER,
    "transformers.models.whisper.modeling_whisper.WhisperDecoderLayer": (_WHISPER[0], _CROSS_ATTENTION, _WHISPER[1]),
}
