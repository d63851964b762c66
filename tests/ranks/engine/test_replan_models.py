"""`engine.replan` of other models, precisions and optimizers: as in test_replan.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch import nn

from tests.helpers.fp16_runs import DYNAMIC, fp16_is_supported
from tests.helpers.mixtures import mixture
from tests.helpers.models import llama
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import Phase, Sequence_, assert_same_run, check_sequence, replanned

Check = Callable[[Rank], None]
NEURON, BACKWARD = {"strategy": "neuron"}, {"regime": "backward"}
SCALED = {"dense_branch_scale": "coverage"}


def checkpointed() -> nn.Module:
    """Only a part of it trains."""
    model: Any = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_proj" not in name)
    return model


AROUND = [Phase({}, 1), Phase(BACKWARD | NEURON), Phase(NEURON, 2), Phase({"holders": 2}), Phase(BACKWARD, 0)]
ZERO = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
OF_TORCH = ZERO | {"zero_force_ds_cpu_optimizer": False}
OF_DEEPSPEED = ZERO | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}  # DeepSpeedCPUAdam
IN_HOST_MEMORY = [
    Phase({}, 1),
    Phase(BACKWARD | NEURON, 2),
    Phase(NEURON | {"holders": 2}),
    Phase({}, 1),
]
SEQUENCES = {
    "checkpointed": Sequence_(2, AROUND, "bf16", model=checkpointed, config={"gradient_accumulation_steps": 2}),
    "scaled": Sequence_(2, [Phase({}, 1), Phase(SCALED), Phase(SCALED | NEURON)]),
    "mixture": Sequence_(2, AROUND, model=partial(mixture, "qwen2_moe")),
    "offload_fp32": Sequence_(2, IN_HOST_MEMORY, config=OF_TORCH),
    "offload_bf16": Sequence_(2, IN_HOST_MEMORY, "bf16", config=OF_TORCH),
}


def deepspeeds_step_on_the_host(rank: Rank) -> None:
    """The same state. One that goes on multiplies the powers of its betas, one that was loaded works them out anew."""
    run = Sequence_(2, [], config=OF_DEEPSPEED)
    engine, other = run.engine(IN_HOST_MEMORY[0], 1), run.engine(IN_HOST_MEMORY[1], 2)
    run.train(engine, 2)
    engine.save_checkpoint(str(rank.folder))
    replanned(engine, IN_HOST_MEMORY[1])
    other.load_checkpoint(str(rank.folder))
    assert_same_run(engine, other)
    assert type(engine.optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
    assert run.train(engine, 3) == pytest.approx(run.train(other, 3), rel=1e-6)


def fp16(rank: Rank) -> None:
    config = {"fp16": {"enabled": True} | DYNAMIC, "bf16": {"enabled": False}}
    with fp16_is_supported():
        check_sequence(Sequence_(2, AROUND, config=config), rank)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    for name, run in SEQUENCES.items():
        yield name, partial(check_sequence, run)
    yield "deepspeeds_step_on_the_host", deepspeeds_step_on_the_host
    yield "fp16", fp16


@pytest.mark.checks(2, _cases, slow=["2-deepspeeds*", "2-fp16", "2-offload*", "2-scaled"])
def test_replan_models(outcome: str | None) -> None:
    assert outcome is None, outcome
