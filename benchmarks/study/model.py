"""The models of the study: small GPT-2s over bytes, and their loss row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.study.text import VOCABULARY

LENGTH = 128
_HEAD_WIDTH = 16


@dataclass(frozen=True)
class Size:
    """
    Args:
        width: of the residual stream.
        depth: layers.
        length: bytes of a row.
    """

    width: int
    depth: int
    length: int = LENGTH

    @property
    def num_heads(self) -> int:
        return self.width // _HEAD_WIDTH


def build(size: Size, seed: int, dropout: float = 0.0) -> nn.Module:
    """A model with the weights of a seed; `dropout` is that of Transformers' three places."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=size.width,
        n_layer=size.depth,
        n_head=size.num_heads,
        n_positions=size.length,
        activation_function="gelu",  # one kernel on a CPU
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def losses_of_rows(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Nats per byte of each row [rows, length + 1], [rows]."""
    logits = model(input_ids=rows[:, :-1]).logits
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(len(rows), -1).mean(1)


@torch.no_grad()
def validation_loss(model: nn.Module, rows: torch.Tensor, batch: int = 32) -> float:
    """Of the dense model."""
    training = model.training
    model.eval()
    losses = torch.cat([losses_of_rows(model, own) for own in rows.split(batch)])
    model.train(training)
    return float(losses.double().mean())
