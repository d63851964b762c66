"""Mixtures of experts in the engine: export, checkpoints, models without storage, auxiliary losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import sdp_deepspeed
from sdp_deepspeed.config import MODES
from tests.helpers.mixtures import MIXTURES, mixture
from tests.helpers.models import batches, config, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.world(2)

LAYERS = {"granularity": "layer"}


def test_the_dense_model_is_exported(rank: Rank) -> None:
    """Transformers stores experts one by one; what it reads has the evaluated loss, and may be trained on."""
    from transformers import AutoModelForCausalLM

    for number, (name, mode) in enumerate((("mixtral", MODES[0]), ("gpt_oss", MODES[3]))):
        engine = engine_of(config(holders=1, regime=mode[0], strategy=mode[1]), mixture(name))
        train(engine, num_steps=2)
        folder, batch = rank.folder / f"export{number}", next(batches(1, 1))[0][0]
        engine.save_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            engine.eval()
            assert torch.equal(loss_of(engine, batch), loss_of(loaded.eval(), batch))
        state = dense_state(engine)
        assert_identical({key: loaded.state_dict()[key] for key in state}, state)
        if name == "mixtral":
            loads_again(rank, engine, state)


def loads_again(rank: Rank, engine: Any, state: dict[str, torch.Tensor]) -> None:
    """`load_pretrained` reads what it needs from files; it converts no values, and says how to save without."""
    from transformers import AutoModelForCausalLM

    other = engine_of(config(holders=1), mixture("mixtral"))
    words = ("experts.0.w1", "save_original_format=False")
    refusal(ValueError, lambda: other.load_pretrained(rank.folder / "export0"), *words)
    engine.save_pretrained(rank.folder / "as_in_the_module", save_original_format=False)
    other.load_pretrained(rank.folder / "as_in_the_module")
    assert_identical(dense_state(other), state)
    loaded: Any = AutoModelForCausalLM.from_pretrained(rank.folder / "as_in_the_module")
    assert_identical({key: loaded.state_dict()[key] for key in state}, state)


def test_models_without_storage(rank: Rank) -> None:
    """The same weights in every layout."""
    for name in ("mixtral", "deepseek_v3"):
        states = []
        for block in ({"strategy": "neuron", "branch_scale": "none"}, {"regime": "backward"}):
            torch.manual_seed(5)
            with sdp_deepspeed.Init():
                model = _unseeded(name)
            engine = engine_of(config(holders=1, **block), model)
            states.append(dense_state(engine))
            train(engine, num_steps=1)
        assert_identical(*states)


def _unseeded(name: str) -> Any:
    model, settings, options = MIXTURES[name]
    return model(settings(**options))


def test_auxiliary_losses(rank: Rank) -> None:
    """They train in every mode; a plan with a subnetwork without routers is refused on all ranks."""
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    for regime, strategy in MODES:
        block = LAYERS if strategy == "block" else {}
        settings = config(holders=1, regime=regime, strategy=strategy, check_agreement=True, **block)
        engine = engine_of(settings, mixture("mixtral", num_hidden_layers=4, **options))
        assert all(loss == loss for loss in train(engine, num_steps=2))
    work = partial(engine_of, config(holders=1), mixture("mixtral", num_hidden_layers=1, **options))
    refusal(ValueError, work, "output_router_logits", "no router", "holders")
