"""Which optimizers are known, by the name in JSON and by class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdp_deepspeed.support.optimizers import (
    ELEMENTWISE_OPTIMIZERS,
    WHOLE_TENSOR_OPTIMIZERS,
    is_elementwise,
    is_known,
    steps_whole_tensors,
)


@pytest.mark.parametrize("name", [*ELEMENTWISE_OPTIMIZERS, "adam", "adamw", "lion", "adagrad", "sgd"])
def test_elementwise_optimizers(name: str) -> None:
    assert is_elementwise(name)
    assert is_known(name)


@pytest.mark.parametrize("name", [*WHOLE_TENSOR_OPTIMIZERS, "muon", "lamb"])
def test_optimizers_of_whole_tensors(name: str) -> None:
    assert is_known(name)
    assert not is_elementwise(name)


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "MuAdam", "MuSGD", "LBFGS", "SOAP", "MuonX"])
def test_others_are_unknown(name: str) -> None:
    assert not is_known(name)


def of(name: str, module: str, base: type[Any] = torch.optim.Optimizer) -> type[Any]:
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.optim.Muon, True),
        (torch.optim.Adafactor, True),
        (of("MyMuon", "mine", torch.optim.Muon), True),
        (of("Muon", "mine"), False),  # may have collectives of its own
        (of("Muon", "deepspeed.runtime.zero.muon.original_muon"), False),  # it has
        (of("MuonWithAuxAdam", "deepspeed.runtime.zero.muon.original_muon"), False),
        (of("SingleDeviceMuon", "deepspeed.runtime.zero.muon.original_muon"), True),
        (of("Adafactor", "transformers.optimization"), True),
        (of("Lamb", "mine"), True),
        (torch.optim.AdamW, False),
    ],
)
def test_classes_of_whole_tensors(kind: type[Any], expected: bool) -> None:
    assert steps_whole_tensors(kind) is expected
    assert is_known(kind) is (expected or kind is torch.optim.AdamW)


def test_deepspeeds_own_muon() -> None:
    muon_optimizer = pytest.importorskip("deepspeed.runtime.zero.muon.muon_optimizer")
    assert is_known(muon_optimizer.MuonWithAuxAdam)
    assert not is_known(muon_optimizer.BaseMuonWithAuxAdam)
