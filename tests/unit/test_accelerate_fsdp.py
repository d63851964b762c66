"""What Accelerate's and the Trainer's own FSDP would pass over in silence, and a model that they would train wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainingArguments

import sdp_deepspeed  # noqa: F401  patches all of them
from sdp_deepspeed.accelerate_fsdp import SHARDED
from sdp_deepspeed.config import KEY

BLOCK: dict[str, Any] = {KEY: {"coverage": 0.5}}
REFUSAL = f"{KEY}: has no effect in fsdp_config of .*sdp_deepspeed.fully_shard"


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(True)
    PartialState(cpu=True)
    yield Accelerator()
    AcceleratorState._reset_state(True)


def trainer(folder: Path, fsdp_config: Any) -> Trainer:
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[])
    arguments.fsdp_config = fsdp_config
    return Trainer(nn.Linear(2, 2), arguments)


def test_the_trainer_refuses_a_block_in_its_fsdp_config(tmp_path: Path) -> None:
    """As a dict or a file; and under a name that is almost the block's."""
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"version": 2, **BLOCK}))
    refused: list[Any] = [{"version": 2, **BLOCK}, {f"fsdp_{KEY}": BLOCK[KEY]}, str(path)]
    for config in refused:
        with pytest.raises(ValueError, match=REFUSAL):
            trainer(tmp_path, config)
    with pytest.raises(ValueError, match=KEY):
        trainer(tmp_path, {"subnetwork_data_paralel": BLOCK[KEY]})
    others: list[Any] = [None, {}, {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}, {KEY: {"enabled": False}}]
    for config in others:
        trainer(tmp_path, config)


def test_an_accelerator_refuses_models_that_were_sharded_by_us(accelerator: Accelerator) -> None:
    ours, other = nn.Linear(2, 2), nn.Linear(2, 2)
    SHARDED.add(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Accelerator.prepare: got a model of sdp_deepspeed.fully_shard"):
        accelerator.prepare(optimizer, ours)
    with pytest.raises(ValueError, match=r"Accelerator.prepare_model: got a model of sdp_deepspeed.fully_shard"):
        accelerator.prepare_model(ours)
    with pytest.raises(ValueError, match=r"sdp_deepspeed.fsdp.clip_grad_norm_"):
        accelerator.clip_grad_norm_([*other.parameters(), ours.bias], 1.0)
    other(torch.ones(1, 2)).sum().backward()
    prepared = accelerator.prepare(other)
    assert accelerator.clip_grad_norm_(iter(prepared.parameters()), 0.1) > 0.1  # of all that an iterator gives
    assert torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0) < 0.101


def test_fsdp_of_accelerate_is_said_to_train_the_dense_model(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only there: a block in a file never reaches the program."""
    with caplog.at_level(logging.WARNING, "sdp_deepspeed"):
        accelerator.prepare(nn.Linear(2, 2))
        assert not caplog.messages
        under_fsdp: Any = SimpleNamespace(distributed_type=DistributedType.FSDP, is_main_process=True)
        monkeypatch.setattr(Accelerator.prepare, "__wrapped__", lambda *args: args)
        with pytest.raises(AttributeError):  # what the host does with it is its own affair
            Accelerator.prepare(under_fsdp, nn.Linear(2, 2))
        assert "Accelerate's FSDP trains the dense model" in caplog.text
        caplog.clear()
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as the launcher has it, on CPUs too
        accelerator.prepare(nn.Linear(2, 2))
        assert "Accelerate's FSDP trains the dense model" in caplog.text
