"""Small models, configs and batches that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from safetensors.torch import save_file
from torch import nn

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse

MIXED = {"attention": "neuron", "mlp": "block"}
VOCABULARY = 61  # a prime: divides by nothing
LENGTH = 8
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCABULARY  # where any will do

LLAMA_LIKE: dict[str, Any] = {
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
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_LIKE, num_hidden_layers=num_layers, tie_word_embeddings=tied))


class Wrapped(nn.Module):
    """A model of no library, with tied weights and buffers."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self.inner = llama(tied=True, seed=seed)
        positions = torch.arange(3) + seed
        self.register_buffer("positions", positions)
        self.register_buffer("same_positions", positions)

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


class Diffusing(Wrapped):
    """With a `save_pretrained` as diffusers has it: no `state_dict`, another name of the file."""

    def save_pretrained(self, folder: str) -> None:
        state = {name: value.clone() for name, value in self.state_dict().items()}
        save_file(state, f"{folder}/diffusion_pytorch_model.safetensors")


@dataclass(frozen=True)
class Specimen:
    """A model that the oracle suite trains: small, without dropout, with the counts that decide which plans exist.

    Args:
        config: of one of Transformers' models, without the sizes that all specimens share.
        num_heads: key/value heads per layer (of the one with fewest), the attention units of the neuron strategy.
        num_blocks: units of the block strategy; None for two in each layer, with granularity "layer" one.
        options: of the config.
    """

    model: type[Any]
    config: type[Any]
    num_heads: int = 4
    num_layers: int = 2
    num_blocks: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The same weights each time; vectors are moved away from zeros and ones, which would hide a wrong cut."""
        torch.manual_seed(0)
        settings = {**_SIZES.get(self.config, {}), **self.options}
        settings["initializer_range"] = 0.1  # at 0.02 and this width, attention is nearly uniform and tells little
        model: nn.Module = self.model(self.config(**settings)).requires_grad_(True)  # Whisper freezes a table
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model


def scrambled(model: nn.Module) -> nn.Module:
    """With other weights: no bias is zero and no norm is one, so that a forgotten one is seen; routers are uneven."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


# Odd sizes on purpose: 27 and 29 neurons divide into no number of groups but their own factors.
_GROUPED: dict[str, Any] = LLAMA_LIKE | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2}
_NEOX: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 27,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
}
_SIZES: dict[type[Any], dict[str, Any]] = {
    hf.LlamaConfig: _GROUPED,
    hf.Qwen2Config: _GROUPED,
    hf.Qwen3Config: _GROUPED,
    hf.GPTNeoXConfig: _NEOX,
    hf.GPT2Config: {
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_head": 4,
        "n_layer": 2,
        "n_inner": 29,
        "n_positions": 32,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
}
_ODD = {"hidden_size": 18, "intermediate_size": 29, "num_attention_heads": 6, "num_key_value_heads": 3}
SPECIMENS: dict[str, Specimen] = {
    "llama": Specimen(hf.LlamaForCausalLM, hf.LlamaConfig),
    "llama_tied": Specimen(hf.LlamaForCausalLM, hf.LlamaConfig, options={"tie_word_embeddings": True}),
    "llama_biases": Specimen(hf.LlamaForCausalLM, hf.LlamaConfig, options={"attention_bias": True, "mlp_bias": True}),
    "llama_odd": Specimen(hf.LlamaForCausalLM, hf.LlamaConfig, num_heads=3, options=_ODD),
    "llama_one_layer": Specimen(hf.LlamaForCausalLM, hf.LlamaConfig, num_layers=1, options={"num_hidden_layers": 1}),
    "qwen2": Specimen(hf.Qwen2ForCausalLM, hf.Qwen2Config),
    "qwen3": Specimen(hf.Qwen3ForCausalLM, hf.Qwen3Config),
    "gpt2": Specimen(hf.GPT2LMHeadModel, hf.GPT2Config),
    "gpt_neox_parallel": Specimen(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, options={"use_parallel_residual": True}),
}


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """On the model's device."""
    batch = batch.to(getattr(model, "device", batch.device))
    return model(**inputs_of(model, batch)).loss


def inputs_of(model: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of tokens [rows, LENGTH]; a vision model gets an image that stands for each row, and a class, a speech model
    sounds."""
    inner = getattr(model, "module", model)
    if getattr(inner, "main_input_name", "") == "input_features":
        size, length = inner.config.num_mel_bins, 2 * inner.config.max_source_positions
        sounds = images_of(batch, max(size, length), dtype=next(inner.parameters()).dtype)
        return {"input_features": sounds[:, 0, :size, :length], "labels": batch}
    if getattr(inner, "main_input_name", "") != "pixel_values":
        return {"input_ids": batch, "labels": batch}
    images = images_of(batch, getattr(inner.config, "image_size", 32), dtype=next(inner.parameters()).dtype)
    return {"pixel_values": images, "labels": batch[:, 0] % inner.config.num_labels}


def images_of(tokens: torch.Tensor, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, 3, size, size]: the same for the same tokens [rows, LENGTH]."""
    width = -(-3 * size * size // tokens.shape[1])
    table = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(5))
    values = table.to(tokens.device, dtype)[tokens].flatten(1)
    return values[:, : 3 * size * size].reshape(-1, 3, size, size)


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
        KEY: block,
    }


def parsed(**block: Any) -> SubnetworkConfig:
    """The block as the package reads it."""
    result = parse({KEY: block})
    assert result is not None
    return result


def without_block(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config without our block, for DeepSpeed's own engine."""
    return {key: value for key, value in settings.items() if key != KEY}


def two_groups(named: dict[str, nn.Parameter], decay: float = 0.1) -> list[dict[str, Any]]:
    """The usual split: matrices decay, the rest does not."""
    matrices = [p for p in named.values() if p.dim() > 1]
    rest = [p for p in named.values() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def muon(named: dict[str, nn.Parameter], is_matrix: Callable[[str, nn.Parameter], bool]) -> torch.optim.Optimizer:
    """DeepSpeed's, which has Adam for other tensors."""
    matrices = [parameter for name, parameter in named.items() if is_matrix(name, parameter)]
    others = [parameter for name, parameter in named.items() if not is_matrix(name, parameter)]
    options = [
        {"params": matrices, "use_muon": True, "lr": 0.02},
        {"params": others, "use_muon": False, "lr": 1e-2, "eps": 1e-2},
    ]
    made: torch.optim.Optimizer = MuonWithAuxAdam(options, adam_optimizer=torch.optim.AdamW)
    return made
