"""The decoder families of Transformers 5.23.0, by the qualified name of their layer class."""

from __future__ import annotations

from dataclasses import replace

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

QKVO = InnerLayers(
    (Cut("q_proj", 0), Cut("k_proj", 0), Cut("v_proj", 0), Cut("o_proj", 1, is_output=True)),
    heads="config.num_key_value_heads",
    per_head=("q_norm", "k_norm"),
)
GATED = InnerLayers((Cut("gate_proj", 0), Cut("up_proj", 0), Cut("down_proj", 1, is_output=True)))
_FUSED_GATE = InnerLayers((Cut("gate_up_proj", 0, blocks=2), Cut("down_proj", 1, is_output=True)))

ATTENTION = Branch("attention", norm="input_layernorm", body="self_attn", num_outputs=2, inner=QKVO)
_MLP = Branch("mlp", norm="post_attention_layernorm", body="mlp", inner=GATED)
_LLAMA = (ATTENTION, _MLP)
_GLM = (ATTENTION, replace(_MLP, inner=_FUSED_GATE))

# Norms before and after each branch belong to the branch.
_GEMMA2 = (
    replace(ATTENTION, after=("post_attention_layernorm",)),
    replace(_MLP, norm="pre_feedforward_layernorm", after=("post_feedforward_layernorm",)),
)
_GLM4 = (
    replace(ATTENTION, after=("post_self_attn_layernorm",)),
    replace(_MLP, after=("post_mlp_layernorm",), inner=_FUSED_GATE),
)
# Norms after each branch only; the norms of queries and keys run over all heads.
_OLMO2 = (
    replace(
        ATTENTION,
        norm=None,
        after=("post_attention_layernorm",),
        inner=None,
        uncut_reason="OLMo 2 and 3 normalize queries and keys over all heads together, so heads depend on each other",
    ),
    replace(_MLP, norm=None, after=("post_feedforward_layernorm",)),
)
_STARCODER2 = (ATTENTION, replace(_MLP, inner=InnerLayers((Cut("c_fc", 0), Cut("c_proj", 1, is_output=True)))))
# Both branches read one norm, which is shared.
_COHERE = (
    replace(
        ATTENTION,
        norm=None,
        inner=replace(
            QKVO,
            # Separate weights for each head.
            cuts=(*QKVO.cuts, Cut("q_norm", 0, optional=True), Cut("k_norm", 0, optional=True)),
            per_head=(),
        ),
    ),
    replace(_MLP, norm=None),
)
_PHI = (
    replace(
        ATTENTION,
        norm=None,
        inner=replace(
            QKVO,
            cuts=(*QKVO.cuts[:3], Cut("dense", 1, is_output=True)),
            per_head=("q_layernorm", "k_layernorm"),
        ),
    ),
    replace(_MLP, norm=None, inner=InnerLayers((Cut("fc1", 0), Cut("fc2", 1, is_output=True)))),
)
_PHI3 = (
    replace(
        ATTENTION,
        after=("resid_attn_dropout",),
        inner=InnerLayers(
            (
                Cut("qkv_proj", 0, ("config.num_attention_heads", "num_key_value_heads", "num_key_value_heads")),
                Cut("o_proj", 1, is_output=True),
            ),
            heads="num_key_value_heads",
            scaled=("num_key_value_heads", "config.num_attention_heads"),
        ),
    ),
    replace(_MLP, after=("resid_mlp_dropout",), inner=_FUSED_GATE),
)

_STABLELM_HEADS = replace(ATTENTION, inner=replace(QKVO, scaled=("num_heads", "num_key_value_heads"), per_head=()))
_STABLELM_NORMED = replace(ATTENTION, inner=None, uncut_reason="StableLM with qk_layernorm has a norm for each head")
_ONE_NORM, _TWO_NORMS = ("use_parallel_residual", True), ("use_parallel_residual", False)
_STABLELM = (
    replace(_STABLELM_HEADS, when=(_TWO_NORMS, ("self_attn.qk_layernorm", False))),
    replace(_STABLELM_NORMED, when=(_TWO_NORMS, ("self_attn.qk_layernorm", True))),
    replace(_STABLELM_HEADS, norm=None, when=(_ONE_NORM, ("self_attn.qk_layernorm", False))),
    replace(_STABLELM_NORMED, norm=None, when=(_ONE_NORM, ("self_attn.qk_layernorm", True))),
    replace(_MLP, after=("dropout",), when=(_TWO_NORMS,)),
    replace(_MLP, norm=None, after=("dropout",), when=(_ONE_NORM,)),
)

# The layers of the MLP are children of the decoder layer.
_OPT_ATTENTION = Branch(
    "attention",
    norm="self_attn_layer_norm",
    body="self_attn",
    num_outputs=2,
    inner=InnerLayers(
        (Cut("q_proj", 0), Cut("k_proj", 0), Cut("v_proj", 0), Cut("out_proj", 1, is_output=True)),
        heads="num_heads",
        scaled=("num_heads",),
    ),
)
_OPT_MLP = Branch(
    "mlp",
    norm="final_layer_norm",
    body=("fc1", "activation_fn", "fc2"),
    inner=InnerLayers((Cut("fc1", 0), Cut("fc2", 1, is_output=True))),
)
_NORM_BEFORE, _NORM_AFTER = (("do_layer_norm_before", True),), (("do_layer_norm_before", False),)
_OPT = (
    replace(_OPT_ATTENTION, when=_NORM_BEFORE),
    replace(_OPT_MLP, when=_NORM_BEFORE),
    # Norms after the addition, on the residual stream, are shared.
    replace(_OPT_ATTENTION, norm=None, when=_NORM_AFTER),
    replace(_OPT_MLP, norm=None, when=_NORM_AFTER),
)

# GPT-2's Conv1D stores [in, out].
_GPT2 = (
    Branch(
        "attention",
        norm="ln_1",
        body="attn",
        num_outputs=2,
        inner=InnerLayers(
            (Cut("c_attn", 1, blocks=3), Cut("c_proj", 0, is_output=True)),
            heads="num_heads",
            scaled=("split_size",),
            tail=("resid_dropout",),
        ),
    ),
    Branch(
        "mlp",
        norm="ln_2",
        body="mlp",
        inner=InnerLayers((Cut("c_fc", 1), Cut("c_proj", 0, is_output=True)), tail=("dropout",)),
    ),
)
# Serial and parallel form: in the latter both branches read the layer's input.
_GPT_NEOX = (
    Branch(
        "attention",
        norm="input_layernorm",
        body="attention",
        after=("post_attention_dropout",),
        num_outputs=2,
        inner=InnerLayers(
            (Cut("query_key_value", 0), Cut("dense", 1, is_output=True)),
            heads="config.num_attention_heads",
        ),
    ),
    Branch(
        "mlp",
        norm="post_attention_layernorm",
        body="mlp",
        after=("post_mlp_dropout",),
        inner=InnerLayers((Cut("dense_h_to_4h", 0), Cut("dense_4h_to_h", 1, is_output=True))),
    ),
)
# Both branches read one norm.
_GPTJ = (
    Branch(
        "attention",
        body="attn",
        num_outputs=2,
        inner=InnerLayers(
            (*QKVO.cuts[:3], Cut("out_proj", 1, is_output=True)),
            heads="num_attention_heads",
            scaled=("num_attention_heads",),
            tail=("resid_dropout",),
        ),
    ),
    Branch(
        "mlp", body="mlp", inner=InnerLayers((Cut("fc_in", 0), Cut("fc_out", 1, is_output=True)), tail=("dropout",))
    ),
)
# Bodies add the residual stream themselves; with a flag of the config, they add the output of the norm instead.
_BLOOM_ATTENTION = Branch(
    "attention",
    norm="input_layernorm",
    body="self_attention",
    num_outputs=2,
    added_to=1,
    uncut_reason="ALiBi slopes are passed for all heads together (BLOOM)",
    when=(("apply_residual_connection_post_layernorm", False),),
)
_BLOOM_MLP = Branch(
    "mlp",
    norm="post_attention_layernorm",
    body="mlp",
    added_to=1,
    inner=InnerLayers((Cut("dense_h_to_4h", 0), Cut("dense_4h_to_h", 1, is_output=True))),
    when=(("apply_residual_connection_post_layernorm", False),),
)
_NORM_ON_STREAM = (("apply_residual_connection_post_layernorm", True),)
_BLOOM = (
    _BLOOM_ATTENTION,
    _BLOOM_MLP,
    replace(_BLOOM_ATTENTION, norm=None, when=_NORM_ON_STREAM),
    replace(_BLOOM_MLP, norm=None, when=_NORM_ON_STREAM),
)


DECODERS: dict[str, tuple[Branch, ...]] = {
    "transformers.models.bloom.modeling_bloom.BloomBlock": _BLOOM,
    "transformers.models.cohere.modeling_cohere.CohereDecoderLayer": _COHERE,
    "transformers.models.cohere2.modeling_cohere2.Cohere2DecoderLayer": _COHERE,
    "transformers.models.gemma.modeling_gemma.GemmaDecoderLayer": _LLAMA,
    "transformers.models.gemma2.modeling_gemma2.Gemma2DecoderLayer": _GEMMA2,
    "transformers.models.gemma3.modeling_gemma3.Gemma3DecoderLayer": _GEMMA2,
    "transformers.models.glm.modeling_glm.GlmDecoderLayer": _GLM,
    "transformers.models.glm4.modeling_glm4.Glm4DecoderLayer": _GLM4,
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _GPT2,
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer": _GPT_NEOX,
    "transformers.models.gptj.modeling_gptj.GPTJBlock": _GPTJ,
    "transformers.models.granite.modeling_granite.GraniteDecoderLayer": _LLAMA,
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": _LLAMA,
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": _LLAMA,
    "transformers.models.olmo.modeling_olmo.OlmoDecoderLayer": _LLAMA,
    "transformers.models.olmo2.modeling_olmo2.Olmo2DecoderLayer": _OLMO2,
    "transformers.models.olmo3.modeling_olmo3.Olmo3DecoderLayer": _OLMO2,
    "transformers.models.opt.modeling_opt.OPTDecoderLayer": _OPT,
    "transformers.models.phi.modeling_phi.PhiDecoderLayer": _PHI,
    "transformers.models.phi3.modeling_phi3.Phi3DecoderLayer": _PHI3,
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": _LLAMA,
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLDecoderLayer": _LLAMA,
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": _LLAMA,
    "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextDecoderLayer": _LLAMA,
    "transformers.models.smollm3.modeling_smollm3.SmolLM3DecoderLayer": _LLAMA,
    "transformers.models.stablelm.modeling_stablelm.StableLmDecoderLayer": _STABLELM,
    "transformers.models.starcoder2.modeling_starcoder2.Starcoder2DecoderLayer": _STARCODER2,
}
