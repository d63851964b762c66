"""The Trainer of Transformers on a tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.hosts import deepspeed_config, rows
from tests.helpers.models import llama

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}


def trainer_of(folder: Path, block: Mapping[str, Any], *, config: Mapping[str, Any] = ADAMW, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {name: options.pop(name) for name in ("callbacks", "data_collator") if name in options}
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 1,  # a larger last batch would be filled up with rows that count twice
        "max_steps": 4,
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "deepspeed": deepspeed_config(block, **config),
    }
    data, evaluated = options.pop("data", rows(32)), options.pop("evaluated", rows(7))
    made = TrainingArguments(str(folder), **{**arguments, **options})
    return Trainer(llama(), made, train_dataset=data, eval_dataset=evaluated, **given)
