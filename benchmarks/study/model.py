"""The models of the study: small Llamas over bytes, and their loss row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.study.text import VOCABULARY

LENGTH = 128
HEAD_WIDTH = 16
LossesOfRows = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """
    Args:
        width: of the residual stream.
        depth: layers.
        length: bytes of a row.
        head_width: of an attention head.
    """

    width: int
    depth: int
    length: int = LENGTH
    head_width: int = HEAD_WIDTH

    @property
    def num_heads(self) -> int:
        return self.width // self.head_width

    @property
    def num_neurons(self) -> int:
        """Of an MLP: eight thirds of the width, up to a multiple of 4."""
        return -(-self.width * 8 // 12) * 4

    @property
    def initial_deviation(self) -> float:
        """Standard deviation of initial weights: sqrt(2 / (5 width)), as in arXiv 1910.05895. Transformers' 0.02 is for
        widths of a thousand; with it a model this narrow, above all a deep one, spends its first hundred steps on
        leaving the start."""
        return math.sqrt(2 / (5 * self.width))

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of a layer."""
        return 4 * self.width**2 + 3 * self.width * self.num_neurons


def build(size: Size, seed: int) -> nn.Module:
    """A model with the weights of a seed, on the CPU; embeddings are tied to the head."""
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(config_of(size))
    return model


def config_of(size: Size) -> LlamaConfig:
    """As Transformers has it, but for the start."""
    return LlamaConfig(
        initializer_range=size.initial_deviation,
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=size.num_neurons,
        num_hidden_layers=size.depth,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def losses_of_rows(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Nats per byte of each row [rows, length + 1], [rows]."""
    logits = model(input_ids=rows[:, :-1]).logits
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(len(rows), -1).mean(1)


@torch.no_grad()
def validation_loss(model: nn.Module, rows: torch.Tensor, losses_of: LossesOfRows, batch: int = 32) -> float:
    """Of the dense model."""
    training = model.training
    model.eval()
    losses = torch.cat([losses_of(model, own) for own in rows.split(batch)])
    model.train(training)
    return float(losses.double().mean())
