"""Under the Trainer of Transformers: train, evaluate and save the dense model, resume."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.models import LENGTH, VOCABULARY, llama
from tests.helpers.ranks import Rank


def _data(num: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, VOCABULARY, (LENGTH,), generator=generator) for _ in range(num)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _trainer(folder: Path, num_steps: int, block: Mapping[str, Any]) -> Any:
    from transformers import Trainer, TrainingArguments

    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "subnetwork_data_parallel": {"coverage": 0.5, **block},
    }
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=1,  # a larger last batch would be filled up with rows that count twice
        max_steps=num_steps,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        deepspeed=config,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    return Trainer(llama(), arguments, train_dataset=_data(32), eval_dataset=_data(7))


def _check_trainer(block: Mapping[str, Any], rank: Rank) -> None:
    from safetensors.torch import load_file

    from sdp_deepspeed.engine.engine import SubnetworkEngine

    whole = _trainer(rank.folder / "whole", 4, block)
    whole.train()
    engine = whole.model_wrapped
    assert isinstance(engine, SubnetworkEngine)
    assert engine.plan.coverage == 0.5
    whole.save_model(str(rank.folder / "final"))
    with engine.dense(resident=True):
        dense = {name: value.clone() for name, value in engine.module.state_dict().items()}
        with torch.no_grad():
            expected = [float(engine.module(**_batch(row)).loss) for row in _data(7)]
    assert abs(whole.evaluate()["eval_loss"] - sum(expected) / len(expected)) < 1e-5
    saved = load_file(rank.folder / "final" / "model.safetensors")
    assert saved.keys() == dense.keys()
    assert all(torch.equal(saved[name], value) for name, value in dense.items())
    _check_resumed(rank, whole, block)


def _check_resumed(rank: Rank, whole: Any, block: Mapping[str, Any]) -> None:
    again = _trainer(rank.folder / "again", 4, block)
    again.train(resume_from_checkpoint=str(rank.folder / "whole" / "checkpoint-2"))
    for name, value in again.model_wrapped.held_tensors().items():
        assert torch.equal(value, whole.model_wrapped.held_tensors()[name]), name


def _batch(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in row.items()}


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Any]]:
    blocks: dict[str, dict[str, Any]] = {
        "trainer": {},
        "neuron": {"strategy": "neuron"},
        "backward": {
            "regime": "backward",
            "strategy": {"attention": "neuron", "mlp": "block"},
            "assignment": "auto",
        },
    }
    return [(name, partial(_check_trainer, block)) for name, block in blocks.items()]


@pytest.mark.checks(2, _checks)
def test_trainer(outcome: str | None) -> None:
    assert outcome is None, outcome
