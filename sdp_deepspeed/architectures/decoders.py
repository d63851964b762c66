"""The decoder families of Transformers (read in 5.23.0), by the qualified name of their layer class."""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

_LLAMA = (
    Branch(
        "attention",
        norm="input_layernorm",
        body="self_attn",
        num_outputs=2,
        inner=InnerLayers(
            (Cut("q_proj", 0), Cut("k_proj", 0), Cut("v_proj", 0), Cut("o_proj", 1, is_output=True)),
            heads="config.num_key_value_heads",
            caches=("past_key_values",),
            per_head=("q_norm", "k_norm"),
        ),
    ),
    Branch(
        "mlp",
        norm="post_attention_layernorm",
        body="mlp",
        inner=InnerLayers((Cut("gate_proj", 0), Cut("up_proj", 0), Cut("down_proj", 1, is_output=True))),
    ),
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
            caches=("past_key_values",),
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
# One description for both forms: in the parallel one both branches read the layer's input.
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
            caches=("layer_past",),
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

DECODERS: dict[str, tuple[Branch, ...]] = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": _LLAMA,
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": _LLAMA,
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": _LLAMA,
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": _LLAMA,
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _GPT2,
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer": _GPT_NEOX,
}
