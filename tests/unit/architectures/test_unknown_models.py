"""A model that nobody described, or of another form than was described, is refused with the lines that describe it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, locate_branches, registry
from sdp_deepspeed.architectures.unknown_models import refuse_unknown_model, repeated_layer
from tests.helpers.core_masks import masked, plan_of
from tests.helpers.models import TOKENS, VOCABULARY

SIZES = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "rotary_dim": 4}
UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str, dict[str, tuple[str, str]]]] = {
    "codegen": (
        lambda: hf.CodeGenForCausalLM(hf.CodeGenConfig(**SIZES | {"n_head": 4})),
        "transformers.models.codegen.modeling_codegen.CodeGenBlock",
        {"attention": ("", "attn"), "mlp": ("", "mlp")},  # one norm for both: neither's own
    ),
    "vit_msn": (
        lambda: hf.ViTMSNForImageClassification(
            hf.ViTMSNConfig(
                hidden_size=16,
                intermediate_size=27,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
                hidden_dropout_prob=0.2,
            )
        ),
        "transformers.models.vit_msn.modeling_vit_msn.ViTMSNLayer",
        {"attention": ("layernorm_before", "attention"), "mlp": ("layernorm_after", "mlp")},
    ),
}


@pytest.fixture(autouse=True)
def own_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_family_that_is_not_described_is_named_with_four_lines(name: str) -> None:
    build, layer, _ = UNKNOWN[name]
    model = build()
    with pytest.raises(ValueError, match=type(model).__name__) as error:
        locate_branches(model)
    message = str(error.value)
    lines = message[message.index("from sdp_deepspeed") :].split("\n")[:4]
    assert lines[0] == "from sdp_deepspeed.architectures import Branch, register"
    assert lines[1] == f'register("{layer}",'
    children = re.search(r"its submodules \((.*?)\)", message)
    assert children is not None
    for child in children[1].split(", "):
        assert repeated_layer(model).get_submodule(child)  # type: ignore[union-attr]
    assert all("norm=" in line and "body=" in line and "after=" in line for line in lines[2:])
    exec("\n".join(lines))  # what is written is Python; and not taken as it is
    with pytest.raises(ValueError, match=r"has no submodule 'NORM'"):
        locate_branches(model)


@pytest.mark.parametrize("name", [name for name, (_, _, branches) in UNKNOWN.items() if branches])
def test_filled_in_the_lines_work(name: str) -> None:
    """With dropout between the body and the addition that no branch has for itself."""
    build, layer, names = UNKNOWN[name]
    branches = [
        Branch(part, norm=norm or None, body=body, num_outputs=2 if part == "attention" else 1)
        for part, (norm, body) in names.items()
    ]
    architectures.register(layer, *branches)
    model: Any = build()
    plan = plan_of(model, "forward", "block")
    for rank in (0, 1):
        subnetwork = masked(model, plan, rank)[0].train()
        if name == "vit_msn":
            loss = subnetwork(torch.ones(2, 3, 8, 8), labels=torch.tensor([0, 1])).loss
        else:
            loss = subnetwork(TOKENS, labels=TOKENS).loss
        loss.backward()
        assert loss.isfinite()


def test_a_model_without_repeated_layers_is_refused_without_a_guess() -> None:
    assert repeated_layer(nn.Linear(2, 2)) is None
    with pytest.raises(ValueError, match=r"Describe yours with sdp_deepspeed\.architectures\.register"):
        refuse_unknown_model(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("build", "form"),
    [
        (
            lambda: hf.BertLMHeadModel(
                hf.BertConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=16,
                    num_attention_heads=2,
                    intermediate_size=8,
                    num_hidden_layers=1,
                    is_decoder=True,
                    add_cross_attention=True,
                )
            ),
            r"BertLayer is not described; known are add_cross_attention = False.*register\(",
        ),
        (
            lambda: hf.FalconForCausalLM(
                hf.FalconConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=16,
                    num_attention_heads=2,
                    num_hidden_layers=1,
                    new_decoder_architecture=True,
                    parallel_attn=False,
                )
            ),
            r"FalconDecoderLayer is not described; known are config\..*register\(",
        ),
    ],
)
def test_a_form_that_is_not_described_is_refused(build: Callable[[], nn.Module], form: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){form}"):
        locate_branches(build())


class Layer(nn.Module):
    def __init__(self, *, is_wide: bool) -> None:
        super().__init__()
        self.is_wide = is_wide
        self.norm, self.ff = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ff(self.norm(x)) if self.is_wide else self.norm(x + self.ff(x))


def test_a_layer_has_the_branches_of_its_form() -> None:
    pre = Branch("mlp", norm="norm", body="ff", when=(("is_wide", True),))
    post = Branch("mlp", body="ff", when=(("is_wide", False),))
    architectures.register(Layer, pre, post)
    model = nn.Sequential(Layer(is_wide=True), Layer(is_wide=False))
    assert [branch.description for branch in locate_branches(model)] == [pre, post]
    architectures.register(Layer, pre, Branch("mlp", body="ff"))
    with pytest.raises(ValueError, match=r"'0': the branches \['mlp', 'mlp'\] of Layer apply"):
        locate_branches(model)


def test_what_no_description_can_be() -> None:
    with pytest.raises(ValueError, match="'mlp': body: name the submodule"):
        Branch("mlp", norm="norm")
    with pytest.raises(ValueError, match=r"'ff\.dropout' is named twice, or inside another"):
        Branch("mlp", body="ff", after=("ff.dropout",))
    with pytest.raises(ValueError, match="'ff' is named twice"):
        Branch("mlp", body=("ff", "act"), after=("ff",))
