"""Start-up does with each row of the support table what the row says: `deepspeed.initialize` on two ranks, and FSDP2's
host on the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sdp_deepspeed.support.fsdp2 import FSDP2_TABLE
from sdp_deepspeed.support.table import TABLE
from tests.helpers import fsdp2_examples
from tests.helpers.fp16_runs import fp16_is_supported
from tests.helpers.ranks import Rank
from tests.helpers.support_examples import HINTS, REFUSED, WORKS, ds_config
from tests.helpers.training import engine_of, refusal, train

pytestmark = pytest.mark.slow

ROWS = {row.what: row for row in TABLE}  # checks carry names: rows ask by functions, which cannot be sent
SHARDED_ROWS = {row.what: row for row in FSDP2_TABLE}
DIVIDES = "tensor parallelism (AutoTP)"  # comes last: DeepSpeed never forgets a group of AutoTP's
# Refused before it is our turn: by DeepSpeed's parser, and where the engine's class is chosen.
EARLIER: dict[str, tuple[type[Exception], str]] = {
    "bf16 optimizer state": (AssertionError, "bf16_optimizer_states requires"),
    "hybrid engine": (ValueError, "DeepSpeedHybridEngine is not supported"),
}


def start(what: str) -> Any:
    """An engine with SGD, which needs no compiler, and with clipping unless the row says otherwise."""
    row = ROWS[what]
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}
    settings |= ds_config(row, row.example)
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}} | settings.get("optimizer", {})
    if settings["optimizer"]["type"] == "AdamW":
        settings["optimizer"]["params"]["torch_adam"] = True
    with fp16_is_supported():
        return engine_of(settings)


@dataclass(frozen=True)
class Starts:
    """A row whose example is trained with for two steps, as a check."""

    what: str

    def __call__(self, rank: Rank) -> None:
        engine = start(self.what)
        if self.what == DIVIDES:
            assert engine.dp_group.size == 1
            return
        assert torch.tensor(train(engine, num_steps=2)).isfinite().all()


@dataclass(frozen=True)
class IsRefused:
    """A row whose example is refused by its path and name, on all ranks."""

    what: str

    def __call__(self, rank: Rank) -> None:
        kind, words = EARLIER.get(self.what, (ValueError, f"{ROWS[self.what].path}: got "))
        refusal(kind, lambda: start(self.what), words)


@dataclass(frozen=True)
class StartsSharded:
    """A row of FSDP2's that works, trained for two steps and evaluated."""

    what: str

    def __call__(self, rank: Rank) -> None:
        row = SHARDED_ROWS[self.what]
        losses = fsdp2_examples.train(row, fsdp2_examples.start(row))
        assert torch.tensor(losses).isfinite().all()


@dataclass(frozen=True)
class IsRefusedSharded:
    """A row of FSDP2's that `fully_shard` refuses for the reason in the table, on all ranks."""

    what: str

    def __call__(self, rank: Rank) -> None:
        row = SHARDED_ROWS[self.what]
        refusal(ValueError, lambda: fsdp2_examples.start(row), row.note, row.path)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for row in FSDP2_TABLE:
        if row.state != "untested" and row.what not in fsdp2_examples.ELSEWHERE:
            kind = IsRefusedSharded if row.state == "refused" else StartsSharded
            yield f"FSDP2, {row.what}: {row.state}", kind(row.what)
    for row in sorted([*REFUSED, *WORKS, *HINTS], key=lambda row: row.what == DIVIDES):
        yield f"{row.what}: {row.state}", IsRefused(row.what) if row in REFUSED else Starts(row.what)


@pytest.mark.checks(2, _cases)
def test_start_up_does_what_the_table_says(outcome: str | None) -> None:
    assert outcome is None, outcome
