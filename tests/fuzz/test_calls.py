"""Sequences of calls that must not change training: drawn, and made between the steps of one of two equal engines."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.models import SPECIMENS, VOCABULARY, batches
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, micro_step, sgd

pytestmark = pytest.mark.world(2)
NUM_STEPS = 4
MODELS = ("llama", "gpt2", "gpt_neox_parallel", "llama_tied")
PROMPT = torch.arange(4)[None] % VOCABULARY


class Interrupted(Exception):
    """Raised by a user inside a context of ours."""


@torch.no_grad()
def evaluate(engine: Any, _folder: Path) -> None:
    engine.eval()
    engine(input_ids=PROMPT)
    engine.train()


@torch.no_grad()
def evaluate_in_dense(engine: Any, _folder: Path) -> None:
    engine.eval()
    with engine.dense():
        engine(input_ids=PROMPT)
    engine.train()


def be_there_and_back(engine: Any, _folder: Path) -> None:
    engine.eval()
    engine.train()


def read_the_dense_model(engine: Any, _folder: Path) -> None:
    with engine.dense():
        engine.module.state_dict()


def leave_by_an_error(engine: Any, _folder: Path) -> None:
    with suppress(Interrupted), engine.dense():
        raise Interrupted


def generate(engine: Any, _folder: Path) -> None:
    engine.eval()
    with torch.no_grad(), engine.dense():
        engine.module.generate(PROMPT, max_new_tokens=2, do_sample=False, pad_token_id=0)
    engine.train()


def step_where_it_is_refused(engine: Any, _folder: Path) -> None:
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


def drop_gradients(engine: Any, _folder: Path) -> None:
    engine.zero_grad()
    engine.optimizer.zero_grad()


def look_around(engine: Any, _folder: Path) -> None:
    engine.held_tensors()
    engine.get_global_grad_norm()
    engine.get_lr()


def pass_forward_and_drop_it(engine: Any, _folder: Path) -> None:
    engine(input_ids=PROMPT)
    with torch.no_grad():
        engine(input_ids=PROMPT)


Call = Callable[[Any, Path], None]
BETWEEN_MICRO_STEPS: tuple[Call, ...] = (
    *(evaluate, evaluate_in_dense, be_there_and_back, read_the_dense_model, leave_by_an_error, generate),
    *(step_where_it_is_refused, export, look_around, pass_forward_and_drop_it),
)
BETWEEN_STEPS: tuple[Call, ...] = (*BETWEEN_MICRO_STEPS, save, save_and_load, drop_gradients)


def settings_of(draw: random.Random, size: int) -> dict[str, Any]:
    block: dict[str, Any] = {
        "regime": draw.choice(("forward", "backward")),
        "strategy": draw.choice(("block", "neuron")),
    }
    block["holders"] = draw.choice((1, 1, size))
    result = sgd(draw.choice((1, 3)), stage=draw.choice((0, 1, 2)), clip=draw.choice((0.0, 0.5)), **block)
    if draw.random() < 0.3:
        result |= {"bf16": {"enabled": True}}
    if draw.random() < 0.5:
        result["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    return result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, count = (metafunc.config.getoption(f"fuzz_{name}") for name in ("seed", "sequences"))
    metafunc.parametrize("seed", range(first, first + count))


def test_training_is_as_without(rank: Rank, seed: int) -> None:
    draw = random.Random(seed)
    settings, model = settings_of(draw, rank.size), draw.choice(MODELS)
    calm, busy = (engine_of(settings, SPECIMENS[model].build()) for _ in range(2))
    made: list[str] = []

    def call(choices: tuple[Call, ...]) -> None:
        for _ in range(draw.choice((0, 1, 1, 2))):
            chosen = draw.choice(choices)
            made.append(chosen.__name__)
            chosen(busy, rank.folder / str(seed))

    told: Mapping[str, Any] = {"seed": seed, "settings": settings, "model": model, "calls": made}
    for step in itertools.islice(batches(rank.size, settings["gradient_accumulation_steps"]), NUM_STEPS):
        call(BETWEEN_STEPS)
        for number, batch in enumerate(step[rank.rank]):
            if number:
                call(BETWEEN_MICRO_STEPS)
            made.append("micro-step")
            assert micro_step(busy, batch) == micro_step(calm, batch), told
    try:
        assert_identical(busy.held_tensors(), calm.held_tensors())
        assert_identical(dense_state(busy), dense_state(calm))
    except AssertionError as different:
        raise AssertionError(told) from different
