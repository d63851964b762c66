"""Layers of a user who described them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sdp_deepspeed.architectures import Branch, Cut, InnerLayers


class Attention(nn.Module):
    """Of GPTs that people write themselves, with a fused projection of queries, keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd, self.head_dim = num_heads, width, width // num_heads
        self.resid_dropout = nn.Dropout(0.5)
        self.register_buffer("bias", torch.ones(8, 8).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in parts)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, length, -1)))


class GatedMLP(nn.Module):
    """Gates and ups in one projection, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 6 * width), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        result: torch.Tensor = self.down(nn.functional.silu(gate) * up)
        return result


class Block(nn.Module):
    """A layer that takes one tensor; output projections begin at zero, which would hide a mistake."""

    def __init__(self, width: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.ln_1, self.attn, self.drop = nn.LayerNorm(width), Attention(width, num_heads), nn.Dropout(0.5)
        self.ln_2, self.mlp = nn.LayerNorm(width), GatedMLP(width)
        for layer in (self.attn.c_proj, self.mlp.down):
            nn.init.zeros_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Tokens in, a loss out."""

    def __init__(self, block: type[nn.Module], width: int = 16, num_layers: int = 2, vocabulary: int = 61) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.h = nn.ModuleList(block() for _ in range(num_layers))
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.seen.add_(input_ids.numel())
        x = self.embed(input_ids)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def attention_of() -> Branch:
    inner = InnerLayers(
        (Cut("c_attn", 0, blocks=3), Cut("c_proj", 1, is_output=True)), heads="n_head", tail=("resid_dropout",)
    )
    return Branch("attention", norm="ln_1", body="attn", after=("drop",), inner=inner)


def mlp_of() -> Branch:
    inner = InnerLayers((Cut("up", 0, blocks=2), Cut("down", 1, is_output=True)))
    return Branch("mlp", norm="ln_2", body="mlp", inner=inner)
