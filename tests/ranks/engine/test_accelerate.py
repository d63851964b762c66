"""Under Accelerate: a loop of one's own, and every way in which such loops save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch

from sdp_deepspeed.masking.placeholders import PartialTensor
from tests.helpers.hosts import deepspeed_config, loaded, mean_loss, rows
from tests.helpers.live_tensors import stored_absent
from tests.helpers.models import MIXED, config, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal

pytestmark = pytest.mark.world(2)


def prepared(block: Mapping[str, Any], *, accumulation: int = 2, seed: int = 0) -> tuple[Any, ...]:
    """accelerator, engine, optimizer, loader and scheduler, as a script makes them."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader

    AcceleratorState._reset_state(True)  # one script in a process is what it knows
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(block))
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation)
    model = llama(seed=seed)
    decayed = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() >= 2]
    other = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    loader: Any = DataLoader(rows(16), batch_size=2)  # type: ignore[arg-type]
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def test_ranks_that_accelerate_does_not_see(rank: Rank) -> None:
    """As without GPUs, if it was started before this package was imported."""
    prepared({})
    from accelerate.state import PartialState

    with mock.patch.dict(PartialState._shared_state, num_processes=1):
        refusal(
            ValueError, lambda: engine_of(config(holders=1)), "Accelerate sees 1 of 2 ranks", "import sdp_deepspeed"
        )


def train(accelerator: Any, engine: Any, optimizer: Any, loader: Any, scheduler: Any) -> None:
    engine.train()
    for batch in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def evaluated(accelerator: Any, engine: Any) -> float:
    """Over all ranks' rows, each once."""
    engine.eval()
    losses = []
    for row in rows(8)[accelerator.process_index :: accelerator.num_processes]:
        with torch.no_grad():
            losses.append(engine(**{name: value[None] for name, value in row.items()}).loss.reshape(1))
    return float(accelerator.gather_for_metrics(torch.cat(losses)).mean())


@pytest.mark.parametrize("block", [{"strategy": "neuron"}, {"regime": "backward", "strategy": "neuron"}])
def test_saves_the_dense_model(block: Mapping[str, Any], rank: Rank) -> None:
    """With the state dict that Accelerate gathers, by the engine, and by the module's own call in `dense()`."""
    accelerator, engine, *rest = prepared(block)
    train(accelerator, engine, *rest)
    module, names = accelerator.unwrap_model(engine), ["given", "own", "inside"]
    if block.get("regime") == "backward":  # every rank has the whole model there, so one may save by itself
        names.append("alone")
        if rank.rank == 0:
            module.save_pretrained(rank.folder / "alone")
    loss, whole = evaluated(accelerator, engine), dense_state(engine)
    writes = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    module.save_pretrained(rank.folder / "given", state_dict=accelerator.get_state_dict(engine), **writes)
    engine.save_pretrained(rank.folder / "own")
    with engine.dense():
        module.save_pretrained(rank.folder / "inside", **writes)
    accelerator.wait_for_everyone()
    for name in names:
        found = loaded(rank.folder / name)
        assert_identical(found.state_dict(), whole)
        assert mean_loss(found, rows(8)) == pytest.approx(loss, abs=1e-5)
    train(accelerator, engine, *rest)  # goes on as if nobody had saved
    assert not stored_absent(engine)


def test_resumes(rank: Rank) -> None:
    """From `save_state`, with another model's weights before it."""
    block = {"strategy": MIXED}
    first = prepared(block)
    train(*first)
    first[0].save_state(str(rank.folder / "state"))
    train(*first)
    again = prepared(block, seed=1)
    train(*again)
    again[0].load_state(str(rank.folder / "state"))
    train(*again)
    assert_identical(dense_state(again[1]), dense_state(first[1]))


def test_state_dicts_that_nobody_reads(rank: Rank) -> None:
    """As Lightning does before each checkpoint: it takes a state dict on all ranks, drops it, and has the engine save.
    Of rank 0 alone too, at once: no rank waits."""
    accelerator, engine, *rest = prepared({})
    train(accelerator, engine, *rest)
    states = {"state_dict": engine.module.state_dict(), "optimizer_states": [engine.optimizer.state_dict()]}
    checkpoint = {"epoch": 1, **states}
    if rank.rank == 0:
        engine.module.state_dict()
    assert any(isinstance(value, PartialTensor) for value in states["state_dict"].values())
    client = {name: value for name, value in checkpoint.items() if name not in states}
    engine.save_checkpoint(str(rank.folder / "one.ckpt"), client_state=client, tag="checkpoint")
    _, state = engine.load_checkpoint(str(rank.folder / "one.ckpt"), load_lr_scheduler_states=False)
    assert state == {"epoch": 1}
    refusal(RuntimeError, lambda: torch.save(engine.module.state_dict(), rank.folder / "x.pt"), "partial", "on all")
