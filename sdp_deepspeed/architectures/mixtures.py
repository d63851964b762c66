"""Mixtures of experts of Transformers 5.23.0, by the qualified name of their layer class.

Transformers stores all experts of a layer in two tensors, [expert, out, in]. Some layers of a model may have an MLP
instead.

A block unit is the whole branch with norm, router and experts, so that tokens are routed as in the dense model. Single
experts are not units: a rank without one could not send tokens anywhere, since routers normalize over the experts that
they choose. A neuron unit is the same share of the neurons of every expert; router, norms and output biases are shared,
so routing is the dense model's there, too.
"""

from __future__ import annotations

from dataclasses import replace

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers
from sdp_deepspeed.architectures.decoders import ATTENTION, GATED, QKVO

_ROUTED = (Cut("experts.gate_up_proj", 1, blocks=2), Cut("experts.down_proj", 2, is_output=True))
# Multi-head latent attention: projections to the latent space, and norms there, are shared by all heads.
_LATENT = InnerLayers(
    (
        Cut("q_proj", 0, optional=True),
        Cut("q_b_proj", 0, optional=True),
        Cut("kv_b_proj", 0),
        Cut("o_proj", 1, is_output=True),
    ),
    heads="num_heads",
)


def _mixture(shared: str | None = None) -> Branch:
    """A branch of gated experts, optionally with a shared expert, or with an MLP in their place."""
    beside = [replace(cut, module=f"{shared}.{cut.module}") for cut in GATED.cuts if shared]
    cuts = tuple(replace(cut, optional=True) for cut in (*_ROUTED, *beside, *GATED.cuts))
    return Branch("mlp", norm="post_attention_layernorm", body="mlp", inner=InnerLayers(cuts, before=("gate",)))


_DEEPSEEK = (replace(ATTENTION, inner=_LATENT), _mixture("shared_experts"))
# Sinks are a logit per query head. Gates and ups alternate; matrices are stored as [expert, in, out].
_GPT_OSS = (
    replace(ATTENTION, inner=replace(QKVO, cuts=(*QKVO.cuts, Cut("sinks", 0)))),
    Branch(
        "mlp",
        norm="post_attention_layernorm",
        body="mlp",
        num_outputs=2,
        inner=InnerLayers((Cut("experts.gate_up_proj", 2, interleaved=2), Cut("experts.down_proj", 1, is_output=True))),
    ),
)
_OLMOE = (
    replace(
        ATTENTION,
        inner=None,
        uncut_reason="OLMoE normalizes queries and keys over all heads together, so heads depend on each other",
    ),
    _mixture(),
)

# Each expert runs on every token, with an input of zeros if it is not chosen.
_LLAMA4_MLP = Branch("mlp", norm="post_attention_layernorm", body="feed_forward")
_LLAMA4 = (
    ATTENTION,
    replace(
        _LLAMA4_MLP,
        num_outputs=2,
        inner=InnerLayers(
            (
                Cut("experts.gate_up_proj", 2, blocks=2),
                Cut("experts.down_proj", 1, is_output=True),
                *(replace(cut, module=f"shared_expert.{cut.module}") for cut in GATED.cuts),
            )
        ),
        when=(("is_moe_layer", True),),
    ),
    replace(_LLAMA4_MLP, inner=GATED, when=(("is_moe_layer", False),)),
)
# The queries and gates of a head are adjacent.
_QWEN3_NEXT = (
    replace(ATTENTION, when=(("block_type", "full_attention"),)),
    Branch(
        "linear_attention",
        norm="input_layernorm",
        body="linear_attn",
        uncut_reason="all heads of a gated delta net share one convolution (Qwen3-Next)",
        when=(("block_type", "linear_attention"),),
    ),
    _mixture("shared_expert"),
)

MIXTURES: dict[str, tuple[Branch, ...]] = {
    "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2DecoderLayer": _DEEPSEEK,
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3DecoderLayer": _DEEPSEEK,
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssDecoderLayer": _GPT_OSS,
    "transformers.models.llama4.modeling_llama4.Llama4TextDecoderLayer": _LLAMA4,
    "transformers.models.mixtral.modeling_mixtral.MixtralDecoderLayer": (ATTENTION, _mixture()),
    "transformers.models.olmoe.modeling_olmoe.OlmoeDecoderLayer": _OLMOE,
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeDecoderLayer": (ATTENTION, _mixture("shared_expert")),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer": (ATTENTION, _mixture()),
    "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextDecoderLayer": _QWEN3_NEXT,
}
