"""The decoder families of Transformers (read in 5.23.0), by the qualified name of their layer class."""

from __future__ import annotations

from .branch import Branch

_LLAMA = (
    Branch("attention", norm="input_layernorm", body="self_attn", num_outputs=2),
    Branch("mlp", norm="post_attention_layernorm", body="mlp"),
)
_GPT2 = (
    Branch("attention", norm="ln_1", body="attn", num_outputs=2),
    Branch("mlp", norm="ln_2", body="mlp"),
)
# One description for both forms: in the parallel one both branches read the layer's input.
_GPT_NEOX = (
    Branch("attention", norm="input_layernorm", body="attention", after=("post_attention_dropout",), num_outputs=2),
    Branch("mlp", norm="post_attention_layernorm", body="mlp", after=("post_mlp_dropout",)),
)

DECODERS: dict[str, tuple[Branch, ...]] = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": _LLAMA,
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": _LLAMA,
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": _LLAMA,
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": _LLAMA,
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _GPT2,
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer": _GPT_NEOX,
}
