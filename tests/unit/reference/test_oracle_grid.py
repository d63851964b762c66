"""The sample of the oracle has every pair of settings that can be combined."""

from __future__ import annotations

import itertools

from tests.helpers.oracle_grid import AXES, cases, grid, pairs_of, possible, sample

LOW = ("bf16", "bf16+fp32", "autocast", "fp16")
# By two axes the pairs that cannot be met, each for a reason of `why_not`. What two ranks, or four in pairs, lack some
# of is held by one.
IMPOSSIBLE = {
    ("model", "strategy"): {("resnet_bottleneck", "mixed"), ("resnet_bottleneck", "opposite")},
    ("model", "granularity"): {("llama_one_layer", "layer"), ("resnet_bottleneck", "layer")},
    ("model", "tensor_parallel"): {(name, 2) for name in ("llama_odd", "gpt2", "mixtral", "resnet_bottleneck")},
    ("model", "rules"): {("llama_one_layer", "depth"), ("resnet_bottleneck", "parts")},
    ("model", "units"): {
        ("resnet_bottleneck", "shared"),
        ("resnet_bottleneck", "mlp"),
        ("resnet_bottleneck", "groups"),
        ("mixtral", "groups"),
    },
    ("model", "precision"): {(name, precision) for name in ("mixtral", "resnet_bottleneck") for precision in LOW},
    ("model", "wire"): {("mixtral", "fp32"), ("resnet_bottleneck", "fp32")},
    ("model", "optimizer"): {("resnet_bottleneck", "AdamW")},
    ("model", "checkpointing"): {("resnet_bottleneck", "reentrant"), ("resnet_bottleneck", "non-reentrant")},
    ("strategy", "granularity"): {(name, "layer") for name in ("neuron", "mixed", "opposite")},
    ("strategy", "units"): {("block", "groups"), ("mixed", "groups"), ("mixed", "mlp"), ("opposite", "mlp")},
    ("granularity", "units"): {("layer", "shared"), ("layer", "groups"), ("layer", "mlp")},
    ("granularity", "rules"): {("layer", "parts")},
    ("ranks", "tensor_parallel"): {(2, 2), (3, 2)},
    ("ranks", "replicas"): {(2, 2), (3, 2)},
    ("ranks", "holders"): {(2, "some")},
    ("tensor_parallel", "replicas"): {(2, 2)},
    ("tensor_parallel", "holders"): {(2, "some")},
    ("replicas", "holders"): {(2, "some")},
    ("holders", "rules"): {("all", "parts"), ("all", "depth")},
    ("rules", "units"): {("parts", "mlp")},
    ("accumulation", "by_caller"): {(1, True)},
    ("precision", "wire"): {("fp32", "fp32")},
    ("precision", "optimizer"): {(precision, "AdamW") for precision in LOW},
    ("wire", "optimizer"): {("fp32", "AdamW")},
}


def test_every_pair_of_settings_is_in_the_sample() -> None:
    """Where something is absent, but for pairs with C = 1."""
    found = set().union(*map(pairs_of, sample()))
    axes = AXES | {"holders": ("one", "some", "all")}
    missing = {}
    for names in itertools.combinations(axes, 2):
        pairs = set(itertools.product(*(axes[name] for name in names)))
        if left := {pair for pair in pairs if tuple(zip(names, pair, strict=True)) not in found}:
            missing[names] = left
    assert missing == IMPOSSIBLE


def test_the_sample_is_small_and_its_names_tell_cases_apart() -> None:
    """Its size decides how long the gate takes."""
    assert len(sample()) <= 60
    assert all(map(possible, grid()))
    assert len({(case.ranks, str(case)) for case in cases(full=True)}) == len(cases(full=True))
