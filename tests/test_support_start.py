"""Start-up does with each row of the support table what the row says, in `deepspeed.initialize` on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import llama
from oracle import half_precision_is_supported
from ranks import Rank
from support_examples import REFUSED, TABLE, ds_config
from training import engine_of, train

from sdp_deepspeed.support_rows import Row

# Refused by DeepSpeed's own parser, by name too, before it makes an engine.
BY_DEEPSPEED = {"old ZeRO stage 1"}


def settings_of(row: Row) -> dict[str, Any]:
    """With SGD, which needs no compiler, and clipping by a norm unless there is none."""
    settings = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 10**6, "gradient_clipping": 0.5}
    settings |= ds_config(row, row.example)
    params = {"lr": 0.1, "torch_adam": True} if row.what == "elementwise optimizers" else {"lr": 0.1}
    settings["optimizer"] = {"type": "SGD", "params": params} | settings.get("optimizer", {})
    return settings


def start(row: Row) -> Any:
    model = llama()
    with half_precision_is_supported():
        return engine_of(settings_of(row), model, model_parameters=list(model.parameters()))


def all_are_refused(rank: Rank) -> None:
    """By name, and before the model is touched."""
    for row in REFUSED:
        with pytest.raises(ValueError, match="subnetwork_data_parallel|not built yet|not possible") as caught:
            start(row)
        assert str(caught.value).startswith(f"{row.path}: got "), (row.what, str(caught.value))


def starts(what: str, rank: Rank) -> None:
    engine = start(next(row for row in TABLE if row.what == what))
    losses = train(engine, num_steps=2) if engine.communicator.size == dist.get_world_size() else [0.0]
    assert torch.tensor(losses).isfinite().all()
