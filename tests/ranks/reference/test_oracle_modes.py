"""Settings of the modes outside the grid of the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank


@dataclass(frozen=True)
class Extra:
    """A case with settings that the grid does not have, as a check."""

    case: Case
    block: dict[str, Any] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> None:
        check_case(self.case, rank, **self.block)


OPPOSITE = {"attention": "block", "mlp": "neuron"}
EXTRAS = {
    # More groups than subnetworks, and so many that some have one neuron and others two.
    "groups-forward": Extra(Case(3, 2, "forward", "neuron", "gpt2"), {"neuron_groups": 5}),
    "groups-backward": Extra(Case(3, 1, "backward", "neuron", "llama_odd"), {"neuron_groups": 20}),
    # Windows of neighbors instead of the balanced search.
    "seed": Extra(Case(3, 1, "forward", "neuron", "qwen2", optimizer="SGD"), {"seed": 5}),
    # Only one part, the parts the other way round, and units that stay shared.
    "mlp-only": Extra(Case(3, 2, "forward", "neuron", "llama_biases"), {"strategy": {"mlp": "neuron"}}),
    "attention-only": Extra(Case(3, 1, "backward", "neuron", "gpt2"), {"strategy": {"attention": "neuron"}}),
    "opposite-forward": Extra(Case(3, 2, "forward", "mixed", "gpt_neox_parallel"), {"strategy": OPPOSITE}),
    "opposite-backward": Extra(Case(3, 2, "backward", "mixed", "llama_odd", stage=0), {"strategy": OPPOSITE}),
    "shared-head": Extra(Case(3, 2, "forward", "neuron", "qwen3"), {"shared": [r"layers\.0\.attention\.head_1$"]}),
    # The dense model in parts, where two parts run at a time, and where a part's modules are not one after the other.
    "interleaved-parts": Extra(Case(3, 1, "forward", "block", "falcon_grouped"), {"evaluation": "prefetch"}),
    "several-bodies": Extra(Case(3, 1, "forward", "neuron", "bert", optimizer="SGD"), {"evaluation": "stream"}),
    "handed-on": Extra(Case(3, 2, "forward", "mixed", "t5"), {"evaluation": "stream"}),
    # Learning rates by coverage where holders step the same, in host memory, and of whole tensors.
    "rates-zero0-bf16": Extra(
        Case(3, 1, stage=0, optimizer="SGD", precision="bf16", by_rules=True, lr_by_coverage="linear")
    ),
    "rates-offload": Extra(
        Case(3, 1, "backward", "neuron", stage=2, offload="cpu", by_rules=True, lr_by_coverage="sqrt")
    ),
    "rates-whole": Extra(Case(3, 1, optimizer="Lamb", by_rules=True, lr_by_coverage="linear")),
    "shared-groups": Extra(Case(3, 2, "backward", "neuron", "llama_tied"), {"shared": [r"group_0$", r"head_3$"]}),
}


def _extras(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    yield from EXTRAS.items()


@pytest.mark.gpu
@pytest.mark.checks(3, _extras)
def test_settings_outside_the_grid(outcome: str | None) -> None:
    assert outcome is None, outcome
