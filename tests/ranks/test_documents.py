"""Each block of Python in README.md and docs/guide.md runs as printed, on two ranks, with what a reader has."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from contextlib import chdir
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.documents import Block, blocks_of
from tests.helpers.hosts import rows
from tests.helpers.models import TOKENS, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import gathered

BLOCKS = blocks_of("python", "diff")
SECTIONS = list(dict.fromkeys((block.document, block.heading) for block in BLOCKS if block.heading))
ONLY_COMPILED = {"lightning", "join"}  # names in blocks that need GPUs, or several teams

pytestmark = pytest.mark.world(2)


class MyBlock(nn.Module):
    """A layer with the names of "your own architecture"."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width)
        self.ff, self.dropout = nn.Sequential(), nn.Dropout(0.0)
        self.ff.add_module("up", nn.Linear(width, 4 * width))
        self.ff.add_module("down", nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.dropout(self.ff(self.ln2(x)))


def evaluate(engine: Any) -> torch.Tensor:
    with torch.no_grad():
        loss: torch.Tensor = engine(input_ids=TOKENS, labels=TOKENS).loss
        return loss


def engine_of(given: dict[str, Any]) -> Any:
    import deepspeed

    model = llama(4)
    config = given["config"]
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]


def loader() -> Any:
    return torch.utils.data.DataLoader(rows(32), batch_size=8)  # type: ignore[arg-type]


def packages() -> dict[str, Any]:
    """What a reader's program has imported, where a block does not."""
    import deepspeed
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    import sdp_deepspeed

    modules = {"torch": torch, "deepspeed": deepspeed, "sdp_deepspeed": sdp_deepspeed}
    classes = AutoModelForCausalLM, Trainer, TrainingArguments
    return modules | {kind.__name__: kind for kind in classes}


class Reader(dict[str, Any]):
    """Builtins of blocks, and what their reader has: made when a block first reads its name.

    Args:
        given: global names of the blocks.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(vars(builtins))
        self.given = given

    def __missing__(self, name: str) -> Any:
        if name not in (*OF_BLOCK, *OF_SECTION):
            raise KeyError(name)
        self.given[name] = (OF_BLOCK | OF_SECTION)[name](self.given)
        return self.given[name]


Make = Callable[[dict[str, Any]], Any]
# Made anew for each block that reads them.
OF_BLOCK: dict[str, Make] = {
    "model": lambda given: nn.Sequential(MyBlock(), MyBlock()) if "MyBlock" in given else llama(4),
    "optimizer": lambda given: torch.optim.AdamW(eval("model", given).parameters()),
    "loader": lambda _: loader(),
}
# Once for a section, unless one of its blocks assigns them.
OF_SECTION: dict[str, Make] = {
    "train": lambda _: rows(32),
    "held_out": lambda _: rows(9),
    "batches": lambda _: list(loader()) * 4,
    "tokens": lambda _: TOKENS,
    "batch": lambda _: torch.randn(3, 5, 8),
    "model_config": lambda _: llama(4).config,
    "MyBlock": lambda _: MyBlock,
    "evaluate": lambda _: evaluate,
    "engine": engine_of,
}


def run(block: Block, given: dict[str, Any]) -> None:
    for name in OF_BLOCK:
        given.pop(name, None)
    if not ONLY_COMPILED & {*block.code.co_names}:
        exec(block.code, given)


@pytest.mark.parametrize(("document", "heading"), SECTIONS)
def test_code_runs_as_printed(document: str, heading: str, rank: Rank) -> None:
    """The blocks of a section, after those before the first section."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # one script in a process is what it knows
    given = packages()
    given["__builtins__"] = Reader(given)
    with chdir(rank.folder):
        if rank.rank == 0:
            whole: Any = llama(4)
            whole.save_pretrained("hf")
        gathered(None)
        for block in BLOCKS:
            if block.document == document and block.heading in ("", heading):
                run(block, given)
