"""Mixtures of experts in the engine: export, and what is loaded again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdp_deepspeed.config import MODES
from tests.helpers.mixtures import mixture
from tests.helpers.models import batches, config, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.world(2)


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
