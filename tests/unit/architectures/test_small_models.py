"""Models of Transformers by the oracle without names: each subnetwork against the dense model with zeroed units."""

from __future__ import annotations

import pytest

from benchmarks.common.small_models import Case, cases
from benchmarks.families import measure, measured


@pytest.mark.parametrize(
    ("case", "neurons"),
    [
        ("causal/bloom/BloomForCausalLM", "partial"),  # additions inside the bodies; attention as blocks
        ("causal/codegen/CodeGenForCausalLM", None),  # parallel, through one norm
        ("causal/glm4/Glm4ForCausalLM", "right"),  # sandwich norms, fused gates
        ("causal/jamba/JambaForCausalLM", None),  # layers of attention, of state space, with and without experts
        ("causal/qwen3_moe/Qwen3MoeForCausalLM", "right"),  # experts, norms of each head
        ("masked/roberta-prelayernorm/RobertaPreLayerNormForMaskedLM", None),  # BERT's modules, other norms
        ("seq2seq/bart/BartForConditionalGeneration", "right"),  # post-norm, cross-attention
        ("image/convnext/ConvNextForImageClassification", "right"),  # layer scale
        ("image/poolformer/PoolFormerForImageClassification", None),  # a branch whose body has no parameters
        ("image/resnet/ResNetForImageClassification", "right"),  # batch norms, a ReLU on the stream
    ],
)
def test_families_are_right(case: str, neurons: str | None) -> None:
    found = measure(Case(*case.split("/")))
    assert "not built" not in found, found["not built"]
    assert found["blocks"]["word"] == "right", found["blocks"]
    assert neurons is None or found["neurons"]["word"] == neurons, found["neurons"]


@pytest.mark.slow
def test_no_family_is_wrong() -> None:
    words = {
        f"{case.name}, {kind}: {found[kind]}"
        for case, found in measured(cases(), seconds=600.0)
        for kind in ("blocks", "neurons")
        if kind in found and found[kind]["word"] in ("wrong", "crashed")
    }
    assert not words
