"""Small mixtures of experts: a model of each family, without dropout."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.helpers.models import LLAMA_LIKE, Specimen, scrambled

_SHAPE: dict[str, Any] = {
    **LLAMA_LIKE,
    **{"num_hidden_layers": 3, "num_experts_per_tok": 2, "initializer_range": 0.1},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
MIXTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**_SHAPE, "intermediate_size": 12, "num_local_experts": 4}),
    # Neurons of a shared expert are no multiple of a routed one's; the first layer has an MLP.
    "qwen2_moe": (
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig,
        {
            **_SHAPE,
            "intermediate_size": 20,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 18,
            "num_experts": 4,
            "mlp_only_layers": [0],
        },
    ),
    # Heads of three sizes; the first layer has an MLP, two shared experts have as many neurons each as a routed one.
    "deepseek_v3": (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config,
        {
            **{name: size for name, size in _SHAPE.items() if name not in ("num_key_value_heads", "head_dim")},
            **{"q_lora_rank": 8, "kv_lora_rank": 6, "attention_bias": True},
            **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5},
            **{"intermediate_size": 20, "moe_intermediate_size": 12, "first_k_dense_replace": 1},
            **{"n_routed_experts": 4, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "num_mtp_layers": 0},
        },
    ),
    "gpt_oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        {**_SHAPE, "intermediate_size": 12, "num_local_experts": 4, "sliding_window": 4},
    ),
    # The first layer has an MLP.
    "llama4": (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig,
        {**_SHAPE, "intermediate_size": 12, "intermediate_size_mlp": 20, "num_local_experts": 4, "moe_layers": [1, 2]},
    ),
    # Linear attention, then full attention; the first layer has an MLP.
    "qwen3_next": (
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig,
        {
            **_SHAPE,
            **{"intermediate_size": 20, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 18},
            **{"num_experts": 4, "mlp_only_layers": [0], "decoder_sparse_step": 1},
            **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
            **{"linear_key_head_dim": 4, "linear_value_head_dim": 4},
        },
    ),
}


def mixture(name: str, **options: Any) -> Any:
    """No bias is zero and no norm is one; routers are far from even."""
    return deepcopy(_built(name, tuple(sorted(options.items()))))


@cache
def _built(name: str, options: tuple[tuple[str, Any], ...]) -> nn.Module:
    model, config, settings = MIXTURES[name]
    torch.manual_seed(0)
    return scrambled(model(config(**{**settings, **dict(options)})))


@dataclass(frozen=True)
class Mixture(Specimen):
    """One of MIXTURES, as a model that the oracle trains."""

    name: str = ""

    @classmethod
    def of(cls, name: str) -> Mixture:
        model, config, options = MIXTURES[name]
        heads = options.get("num_key_value_heads", options["num_attention_heads"])
        return cls(model, config, num_heads=heads, num_layers=options["num_hidden_layers"], name=name)

    def build(self) -> nn.Module:
        return mixture(self.name, **self.options)
