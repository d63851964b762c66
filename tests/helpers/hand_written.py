"""Small models of plain PyTorch that belong to no library, with what must be derived of each.

Each is a way of writing residual layers that no family in branches.json has. `HAND_WRITTEN` has an example of inputs
and the expected branches of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sdp_deepspeed

WIDTH, HEADS, NEURONS, TOKENS, VOCABULARY = 12, 3, 20, 5, 17
Names = tuple[str, ...]


@dataclass(frozen=True)
class HandWritten:
    """A model, an example of its inputs, and its branches.

    Args:
        make: the model, with PyTorch's initial values.
        example: positional arguments of its forward.
        branches: names of the submodules and parameters of each branch, in the order of the additions, by name of the
            layer. Whatever is named nowhere is shared. Empty: no layer adds to a stream, and the model is refused.
    """

    make: Callable[[], nn.Module]
    example: Callable[[], tuple[Any, ...]]
    branches: Mapping[str, tuple[Names, ...]] = field(default_factory=dict)

    def build(self) -> Any:
        """The same weights each time; no bias is zero and no norm is one."""
        torch.manual_seed(0)
        model = self.make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
        return model.train()

    def traced(self) -> Any:
        """With its example."""
        model = self.build()
        sdp_deepspeed.trace(model, *self.example())
        return model


def stream() -> tuple[Tensor]:
    return (torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)),)


def tokens() -> tuple[Tensor]:
    return (torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % VOCABULARY,)


def images() -> tuple[Tensor]:
    return (torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1)),)


class Attention(nn.Module):
    """Causal, with fused queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, NEURONS), nn.GELU(), nn.Linear(NEURONS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Layer(nn.Module):
    """Pre-norm; the others differ in their modules or their forward."""

    def __init__(self, attn: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), attn or Attention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), mlp or Mlp()

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Adds(nn.Module):
    """Adds what its modules make of its input, one after the other."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        added = x
        for module in self.children():
            added = module(added)
        return x + added


PRE_NORM: tuple[Names, ...] = (("ln_1", "attn"), ("ln_2", "mlp"))


class Stack(nn.Module):
    """Layers one after the other, with a norm and a projection at the end."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.h = nn.ModuleList(layers)
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return self.head(self.ln_f(x))


def traced(*layers: nn.Module, stack: type[nn.Module] = Stack) -> Any:
    model = stack(*layers)
    sdp_deepspeed.trace(model, *stream())
    return model


def in_each(*branches: Names, layers: int = 3, prefix: str = "h") -> dict[str, tuple[Names, ...]]:
    """The same branches in all layers."""
    return {f"{prefix}.{index}": branches for index in range(layers)}


def stacked(layer: Callable[..., nn.Module], *branches: Names) -> HandWritten:
    """Three layers of a class that adds these branches to its input."""
    return HandWritten(lambda: Stack(*(layer() for _ in range(3))), stream, in_each(*branches) if branches else {})


class NanoGPT(nn.Module):
    """Embeddings, a dict of modules, and tied weights; returns logits and a loss that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(TOKENS, WIDTH),
                "h": nn.ModuleList([Layer() for _ in range(3)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:  # type: ignore[attr-defined]  # a ModuleList
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, NEURONS, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class ResidualBlock(nn.Module):
    """`out += x`, then a ReLU on the stream. With a stride its shortcut is a convolution, so it can be no unit."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        inside = channels * stride
        self.conv1 = nn.Conv2d(channels, inside, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(inside), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(inside, inside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inside)
        self.downsample = nn.Sequential(nn.Conv2d(channels, inside, 1, stride), nn.BatchNorm2d(inside))
        if stride == 1:
            self.downsample = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


def residual_net() -> nn.Module:
    blocks = nn.Sequential(ResidualBlock(6), ResidualBlock(6), ResidualBlock(6, stride=2), ResidualBlock(12))
    stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))


RESIDUAL: tuple[Names, ...] = (("conv1", "bn1", "conv2", "bn2"),)


class LayerScale(Layer):
    """Parameters of the layer itself multiply what a branch adds; a constant multiplies it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma_1, self.gamma_2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.ln_1(x))
        return x + 0.5 * self.gamma_2 * self.mlp(self.ln_2(x))


class DeepNorm(Layer):
    """Post-norm; the stream is multiplied by a constant before something is added to it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(1.5 * x + self.attn(x))
        return self.ln_2(1.5 * x + self.mlp(x))


class RawParameters(nn.Module):
    """Weights that are the layer's own, used in its forward without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.w_in = nn.Parameter(0.3 * torch.randn(WIDTH, NEURONS))
        self.b_in = nn.Parameter(torch.zeros(NEURONS))
        self.w_out = nn.Parameter(0.3 * torch.randn(NEURONS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.ln(x) @ self.w_in + self.b_in) @ self.w_out


class Mixture(nn.Module):
    """Two of four experts per token; which depends on the data. One more runs for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared_expert = nn.Linear(WIDTH, 4, bias=False), Mlp()
        self.experts = nn.ModuleList([Mlp() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
        return out.view_as(x) + self.shared_expert(x)


class StochasticDepth(Layer):
    """A training forward skips each branch by chance: one pass need not see all of them."""

    def forward(self, x: Tensor) -> Tensor:
        for norm, body in ((self.ln_1, self.attn), (self.ln_2, self.mlp)):
            if not self.training or torch.rand(()) < 0.5:
                x = x + body(norm(x))
        return x


class Recurrent(Stack):
    """One layer that runs three times: absent, it adds nothing in all of them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.h] * 3:
            x = layer(x)
        return self.head(self.ln_f(x))


@dataclass
class State:
    hidden: Tensor
    position: int = 0


class InDict(Layer):
    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]  # on purpose
        return {**x, "hidden": super().forward(x["hidden"])}


class InState(Layer):
    def forward(self, x: State) -> State:  # type: ignore[override]  # on purpose
        return State(super().forward(x.hidden), x.position + 1)


class StackOfDicts(Stack):
    """The stream is an entry of a dict, whose first tensor is another of the same shape."""

    def forward(self, x: Tensor) -> Tensor:
        state = {"first": torch.ones_like(x), "hidden": x}
        for layer in self.h:
            state = layer(state)
        return self.head(self.ln_f(state["hidden"]))


class StackOfStates(Stack):
    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for layer in self.h:
            state = layer(state)
        return self.head(self.ln_f(state.hidden))


_SCALED = (("ln_1", "attn", "gamma_1"), ("ln_2", "mlp", "gamma_2"))

HAND_WRITTEN: dict[str, HandWritten] = {
    "nano_gpt": HandWritten(NanoGPT, tokens, in_each(*PRE_NORM, prefix="transformer.h")),
    "torch_encoder": HandWritten(
        torch_encoder, stream, in_each(("norm1", "self_attn"), ("norm2", "linear1", "linear2"), prefix="layers")
    ),
    "resnet": HandWritten(residual_net, images, dict.fromkeys(("1.0", "1.1", "1.3"), RESIDUAL)),
    "layer_scale": stacked(LayerScale, *_SCALED),
    "deep_norm": stacked(DeepNorm, ("attn",), ("mlp",)),
    "raw_parameters": stacked(RawParameters),
    "mixture": stacked(lambda: Layer(mlp=Mixture()), *PRE_NORM),
    "stochastic_depth": stacked(StochasticDepth, *PRE_NORM),
    "recurrent": HandWritten(lambda: Recurrent(Layer()), stream, in_each(*PRE_NORM, layers=1)),
    "dicts": HandWritten(lambda: StackOfDicts(*(InDict() for _ in range(3))), stream, in_each(*PRE_NORM)),
    "dataclasses": HandWritten(lambda: StackOfStates(*(InState() for _ in range(3))), stream, in_each(*PRE_NORM)),
}
