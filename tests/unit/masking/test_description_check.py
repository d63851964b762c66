"""Descriptions that users gave are tried out at start: wrong ones are refused by name, right ones change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import registry
from sdp_deepspeed.architectures.decoders import DECODERS
from tests.helpers import models
from tests.helpers.descriptions import check
from tests.helpers.own_layers import (
    GPT,
    Block,
    NanoBlock,
    RotaryBlock,
    ScaledBlock,
    attention_of,
    mlp_of,
)

LLAMA: Any = DECODERS["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["block", "neuron", models.MIXED])
@pytest.mark.parametrize("kind", [Block, RotaryBlock])
def test_right_descriptions_pass_with_dropout(kind: type[Block], strategy: Any, dtype: torch.dtype) -> None:
    architectures.register(kind, attention_of(), mlp_of())
    for granularity in ["sublayer", "layer"] if strategy == "block" else ["sublayer"]:
        assert check(GPT(kind).to(dtype), strategy, granularity=granularity) == []


def state_of(model: nn.Module) -> dict[str, Any]:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    hooks = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    classes = {name: type(module) for name, module in model.named_modules()}
    return {"tensors": tensors, "rest": [gradients, modes, hooks, classes, torch.get_rng_state().tolist()]}


@pytest.mark.parametrize("kind", [Block, RotaryBlock])
def test_nothing_of_the_model_changes(kind: type[Block]) -> None:
    """Weights, gradients, buffers, modes of modules (some in evaluation mode), hooks, classes and random numbers."""
    architectures.register(kind, attention_of(), mlp_of())
    model: Any = GPT(kind)
    model(torch.arange(16).view(2, 8)).sum().backward()
    model.h[1].eval()
    before = state_of(model)
    for strategy in ("block", "neuron"):
        check(model, strategy)
    after = state_of(model)
    assert after["rest"] == before["rest"]
    assert all(torch.equal(after["tensors"][name], value) for name, value in before["tensors"].items())


def test_norms_of_each_others_branches() -> None:
    """The mistake that trains a branch without its norm, in silence."""
    for kind in (Block, RotaryBlock):
        architectures.register(kind, attention_of(norm="ln_2"), mlp_of(norm="ln_1"))
        with pytest.raises(ValueError, match=rf"'h\.0' \({kind.__name__}\): described without 'attention'.*`norm`"):
            check(GPT(kind))
        assert check(GPT(kind), granularity="layer") == [], "both are in one unit"


def test_a_module_that_acts_elsewhere_too() -> None:
    class Twice(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.ln_1(x)
            return x + self.mlp(self.ln_2(x + self.attn(x)))

    architectures.register(Twice, attention_of(), mlp_of())
    with pytest.raises(ValueError, match=r"Twice\): described without 'attention', the layer is not what it is when"):
        check(GPT(Twice))


def test_a_sum_that_is_not_one() -> None:
    class Gated(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.mlp(self.ln_2(x))) + self.drop(self.attn(self.ln_1(x)))

    architectures.register(Gated, attention_of(), mlp_of())
    words = r"Gated\): described without 'mlp', the layer does not run: .*lacks the branch"
    with pytest.raises(ValueError, match=words):
        check(GPT(Gated))


@pytest.mark.parametrize("kind", [Block, RotaryBlock])
def test_fused_projections_without_blocks(kind: type[Block]) -> None:
    """Each of these divides evenly, and trains something else."""
    words = rf"'h\.0' \({kind.__name__}\): with the neuron strategy its branch"
    architectures.register(kind, attention_of(blocks=1), mlp_of())
    with pytest.raises(ValueError, match=rf"{words} 'attention' computes something else.*`blocks`.*\"block\" for"):
        check(GPT(kind), "neuron")
    assert check(GPT(kind)) == [], "blocks do not care"
    architectures.register(kind, attention_of(), mlp_of(interleaved=True))
    with pytest.raises(ValueError, match=rf"{words} 'mlp' computes something else"):
        check(GPT(kind), "neuron")
    architectures.register(kind, attention_of(), mlp_of())
    assert check(GPT(kind), "neuron") == []


def test_the_dim_of_the_residual_stream() -> None:
    architectures.register(Block, attention_of(dim=1, blocks=1), mlp_of())
    with pytest.raises(ValueError, match=r"'attention' (computes something else|does not run)"):
        check(GPT(Block), "neuron")


def test_sizes_of_its_own_name_what_they_are_read_from() -> None:
    """nanoGPT's attention; as the message says, it works."""
    architectures.register(NanoBlock, attention_of(), mlp_of())
    with pytest.raises(ValueError, match=r"'attention' does not run with a part of its cells") as error:
        check(GPT(NanoBlock), "neuron")
    for word in ("n_embd = 16", "n_head = 4", "`scaled`", "self.head_dim", 'Or use "block"'):
        assert word in str(error.value)
    assert "training" not in str(error.value)
    architectures.register(ScaledBlock, attention_of(scaled=("n_embd",)), mlp_of())
    assert check(GPT(ScaledBlock), "neuron") == []


def test_each_class_and_the_layers_that_are_cut() -> None:
    """Also where the first layer of the class is shared, and another class is described rightly."""
    architectures.register(Block, attention_of(), mlp_of())
    architectures.register(RotaryBlock, attention_of(norm="ln_2"), mlp_of(norm="ln_1"))
    assert check(GPT(Block), shared=[r"^h\.0\."]) == []
    with pytest.raises(ValueError, match=r"'h\.1' \(RotaryBlock\): described without 'attention'"):
        check(GPT(RotaryBlock, num_layers=3), shared=[r"^h\.0\."])


def test_a_layer_that_takes_half_precision_only() -> None:
    class Half(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype != torch.bfloat16:
                raise TypeError("my kernel is for bf16")
            return super().forward(x)

    architectures.register(Half, attention_of(), mlp_of())
    for strategy in ("block", "neuron"):
        assert check(GPT(Half).bfloat16(), strategy) == []
    architectures.register(Half, attention_of(blocks=1), mlp_of())
    with pytest.raises(ValueError, match="'attention' computes something else"):
        check(GPT(Half).bfloat16(), "neuron")
    architectures.register(Half, attention_of(norm="ln_2"), mlp_of(norm="ln_1"))
    with pytest.raises(ValueError, match="without 'attention'"):
        check(GPT(Half).bfloat16())


class OwnLlamaLayer(LlamaDecoderLayer):
    """Called with position embeddings, masks and a cache."""

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().forward(hidden_states, **options)


def with_own_layers() -> Any:
    model: Any = models.llama()
    model.model.layers = nn.ModuleList(OwnLlamaLayer(model.config, index) for index in range(2))
    return model


def test_layers_of_transformers_that_a_user_described() -> None:
    attention, mlp = LLAMA
    architectures.register(OwnLlamaLayer, attention, mlp)
    for strategy in ("block", "neuron"):
        assert check(with_own_layers(), strategy) == []
    swapped: Mapping[str, str] = {attention.norm: mlp.norm, mlp.norm: attention.norm}
    architectures.register(OwnLlamaLayer, *(replace(b, norm=swapped[b.norm]) for b in (attention, mlp)))
    with pytest.raises(ValueError, match=r"OwnLlamaLayer\): described without 'attention'"):
        check(with_own_layers())


@pytest.mark.parametrize("kind", [Block, RotaryBlock])
def test_models_without_storage(kind: type[Block]) -> None:
    """Nor do they get some: only the copy of a layer does."""
    attention, mlp = LLAMA
    architectures.register(OwnLlamaLayer, attention, mlp)
    architectures.register(kind, attention_of(), mlp_of())
    with torch.device("meta"):
        own, llama = GPT(kind), with_own_layers()
    for strategy in ("block", "neuron"):
        assert check(own, strategy) == check(llama, strategy) == []
    assert all(p.is_meta for model in (own, llama) for p in [*model.parameters(), *model.buffers()])
    architectures.register(kind, attention_of(norm="ln_2"), mlp_of(norm="ln_1"))
    with pytest.raises(ValueError, match=rf"{kind.__name__}\): described without 'attention'"):
        check(own)
    architectures.register(kind, attention_of(blocks=1), mlp_of())
    with pytest.raises(ValueError, match="'attention' computes something else"):
        check(own, "neuron")
    architectures.register(OwnLlamaLayer, replace(attention, norm=mlp.norm), replace(mlp, norm=attention.norm))
    with pytest.raises(ValueError, match=r"OwnLlamaLayer\): described without 'attention'"):
        check(llama)


def test_descriptions_of_the_package_are_not_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tests do that; a user's description of the same class is."""
    model = models.llama()
    monkeypatch.setattr(LlamaDecoderLayer, "__deepcopy__", lambda *_: pytest.fail("copied"), raising=False)
    assert check(model) == []
    monkeypatch.delattr(LlamaDecoderLayer, "__deepcopy__")
    attention, mlp = LLAMA
    architectures.register(LlamaDecoderLayer, replace(attention, norm=mlp.norm), replace(mlp, norm=attention.norm))
    with pytest.raises(ValueError, match="LlamaDecoderLayer\\): described without 'attention'"):
        check(model)


def test_what_cannot_be_tried_out_is_said() -> None:
    class Picky(RotaryBlock):
        def forward(self, x: torch.Tensor, angles: torch.Tensor | None = None, *, scale: float = 0.0) -> torch.Tensor:
            return super().forward(x, angles, scale=scale)

    class Images(GPT):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            raise RuntimeError("images only")

    architectures.register(Picky, attention_of(), mlp_of())
    (note,) = check(Images(Picky))
    assert "'h.0' (Picky) could not be tried out (RuntimeError: images only)" in note


def test_a_layer_that_draws_numbers_in_evaluation_too() -> None:
    class Noisy(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.randn_like(x)

    architectures.register(Noisy, attention_of(norm="ln_2"), mlp_of(norm="ln_1"))
    (note,) = check(GPT(Noisy))
    assert "computes something else each time" in note


def test_with_all_units_everywhere_there_is_nothing_to_check() -> None:
    architectures.register(Block, attention_of(norm="ln_2"), mlp_of(norm="ln_1"))
    assert check(deepcopy(GPT(Block)), holders=2) == []
