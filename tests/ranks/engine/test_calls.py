"""Calls that must not change training, made between the steps and micro-steps of one of two equal engines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp_deepspeed.config import MODES
from tests.helpers.models import SPECIMENS, VOCABULARY, batches
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, micro_step, sgd

pytestmark = pytest.mark.world(2)
PROMPT = torch.arange(4)[None] % VOCABULARY


class Interrupted(Exception):
    """Raised by a user inside a context of ours."""


@torch.no_grad()
def evaluate_in_dense(engine: Any, folder: Path) -> None:
    engine.eval()
    with engine.dense():
        engine(input_ids=PROMPT)
    engine.train()


def leave_by_an_error(engine: Any, folder: Path) -> None:
    with suppress(Interrupted), engine.dense():
        raise Interrupted


def generate(engine: Any, folder: Path) -> None:
    engine.eval()
    with torch.no_grad(), engine.dense():
        engine.module.generate(PROMPT, max_new_tokens=2, do_sample=False, pad_token_id=0)
    engine.train()


def step_where_it_is_refused(engine: Any, folder: Path) -> None:
    with engine.dense(), pytest.raises(RuntimeError, match=r"inside engine\.dense"):
        engine.step()


def save(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder))


def save_and_load(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder / "again"), tag="tag")
    engine.load_checkpoint(str(folder / "again"), tag="tag")


def export(engine: Any, folder: Path) -> None:
    engine.save_pretrained(folder / "hf")
    engine.save_16bit_model(str(folder / "16bit"))


def drop_gradients(engine: Any, folder: Path) -> None:
    engine.zero_grad()
    engine.optimizer.zero_grad()


def keep_gradients_as_zeros(engine: Any, folder: Path) -> None:
    engine.module.zero_grad(set_to_none=False)


def replace_data(engine: Any, folder: Path) -> None:
    for parameter in engine.module.parameters():
        parameter.data = parameter.data.clone()


def move_where_it_is(engine: Any, folder: Path) -> None:
    engine.to("cpu").float()


def look_around(engine: Any, folder: Path) -> None:
    engine.held_tensors()
    engine.get_global_grad_norm()
    engine.get_lr()


def pass_forward_and_drop_it(engine: Any, folder: Path) -> None:
    engine(input_ids=PROMPT)
    with torch.no_grad():
        engine(input_ids=PROMPT)


BETWEEN_MICRO_STEPS: tuple[Callable[[Any, Path], None], ...] = (
    *(evaluate_in_dense, leave_by_an_error, generate, step_where_it_is_refused),
    *(export, look_around, pass_forward_and_drop_it, replace_data, move_where_it_is),
)
BETWEEN_STEPS = (*BETWEEN_MICRO_STEPS, save, save_and_load, drop_gradients, keep_gradients_as_zeros)


def test_training_is_as_without(rank: Rank) -> None:
    for mode, stage, name in zip(
        MODES, (1, 2, 2, 1), ("llama", "gpt2", "gpt_neox_parallel", "llama_tied"), strict=True
    ):
        settings = sgd(2, stage=stage, clip=0.5, **mode._asdict())
        calm, busy = (engine_of(settings, SPECIMENS[name].build()) for _ in range(2))
        for number, call in enumerate(BETWEEN_STEPS):
            call(busy, rank.folder / name)
            first, second = next(batches(rank.size, 2, seed=number))[rank.rank]
            assert micro_step(busy, first) == micro_step(calm, first), (name, call)
            BETWEEN_MICRO_STEPS[number % len(BETWEEN_MICRO_STEPS)](busy, rank.folder / name)
            assert micro_step(busy, second) == micro_step(calm, second), (name, call)
        assert_identical(busy.held_tensors(), calm.held_tensors())
        assert_identical(dense_state(busy), dense_state(calm))
