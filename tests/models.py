"""Small models, configs and batches that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 61  # a prime: divides by nothing
LENGTH = 8

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}


def llama(num_layers: int = 2, *, tied: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_LLAMA_LIKE, num_hidden_layers=num_layers, tie_word_embeddings=tied))


def family(name: str, num_layers: int = 2, seed: int = 0) -> nn.Module:
    """One small model of each supported family, without dropout."""
    torch.manual_seed(seed)
    like = _LLAMA_LIKE | {"num_hidden_layers": num_layers}
    if name in ("gpt_neox", "gpt_neox_parallel"):
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=24,
                num_attention_heads=4,
                num_hidden_layers=num_layers,
                max_position_embeddings=32,
                use_parallel_residual=name == "gpt_neox_parallel",
            )
        )
    if name == "gpt2":
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_head=4, n_layer=num_layers, n_positions=32)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return GPT2LMHeadModel(config)
    makers: dict[str, Any] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**like)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**like)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**like)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**like)),
    }
    return makers[name]()


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "gpt_neox_parallel")


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def batches(num_ranks: int, num_micro: int, seed: int = 1, size: int = 2) -> Iterator[list[list[torch.Tensor]]]:
    """Endless steps; each is per rank a list of micro-batches [size, LENGTH], the same on every rank that asks."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield [
            [torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator) for _ in range(num_micro)]
            for _ in range(num_ranks)
        ]


def config(**block: Any) -> dict[str, Any]:
    """A DeepSpeed config with our block; `block` holds the block's keys."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "subnetwork_data_parallel": block,
    }


def two_groups(named: dict[str, nn.Parameter], decay: float = 0.1) -> list[dict[str, Any]]:
    """The usual split: matrices decay, the rest does not."""
    matrices = [p for p in named.values() if p.dim() > 1]
    rest = [p for p in named.values() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
