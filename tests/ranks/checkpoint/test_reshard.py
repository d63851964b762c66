"""A checkpoint of one layout goes on with another: the same dense weights, masters and moments, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp_deepspeed.checkpoint.saved_tensors import written_state
from tests.helpers.checkpointed_runs import dense_of, dense_tensors, outcomes_of, settings_of
from tests.helpers.ranks import Rank
from tests.helpers.tensor_parallel_models import build
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, train

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}


@dataclass(frozen=True)
class Run:
    """A layout.

    Args:
        block: of the config.
        tp: tensor-parallel ranks.
    """

    size: int
    stage: int = 1
    precision: str = "fp32"
    block: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    bucket: float = 5e8
    offload: bool = False

    def settings(self) -> dict[str, Any]:
        result = settings_of(self.stage, self.precision, **self.block) | {"optimizer": ADAM}
        result["zero_optimization"]["reduce_bucket_size"] = int(self.bucket)
        if self.offload:
            result["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if self.tp > 1:
            result["tensor_parallel"] = {"autotp_size": self.tp}
        return result


NEURON, LAYERS = {"strategy": "neuron"}, {"granularity": "layer"}
BACKWARD = {"regime": "backward"}
BY_RULES = {"holders": [{"units": "mlp", "holders": 1}, {"holders": 2}]}
WRITERS = {
    "forward_block": Run(2),
    "neuron_zero2_small_buckets": Run(2, stage=2, block=NEURON, bucket=100),
    "backward_neuron_stage0_bf16": Run(2, stage=0, precision="bf16", block=NEURON | BACKWARD),
    "three_bf16_by_rules": Run(3, precision="bf16", block=BY_RULES),
    "replicas": Run(4, block={"subnetworks": 2}),
    "tensor_parallel": Run(4, tp=2, block=NEURON),
}
READERS = {
    "three_holders_of_three_zero2": Run(3, stage=2, block=NEURON | {"holders": 2}),
    "stage0_layers": Run(2, stage=0, block=LAYERS),
    "backward_block_bf16": Run(2, precision="bf16", block=BACKWARD),
    "backward_neuron_by_rules": Run(3, stage=2, block=BACKWARD | NEURON | BY_RULES, bucket=64),
    "tensor_parallel_bf16": Run(4, tp=2, precision="bf16"),
    "offload": Run(2, offload=True),
    "alone": Run(1),
}


def model() -> Any:
    """Tied embeddings, a frozen parameter, and a buffer."""
    found: Any = build("llama_tied")
    found.model.norm.weight.requires_grad_(False)
    found.register_buffer("seen", torch.arange(3.0))
    return found


def write(run: Run, name: str, folder: Path, rank: Rank) -> None:
    """Each element of each dense tensor is written by one rank."""
    engine = engine_of(run.settings(), model())
    train(engine, num_steps=3)
    parts = gathered(written_state(engine._core.state()))
    engine.save_checkpoint(str(folder / name), client_state={"position": 3})
    stored = dense_tensors(folder / name / "global_step3")
    if rank.rank == 0:
        assert_identical(stored, dense_of(parts))
    assert_rounded(dense_state(engine), stored)


def read(run: Run, source: str, folder: Path, rank: Rank) -> None:
    """Masters, moments and what is not trained are those that were saved, weights are rounded masters."""
    engine = engine_of(run.settings(), model())
    train(engine, num_steps=1, seed=7)
    _, client_state = engine.load_checkpoint(str(folder / source))
    assert client_state == {"position": 3}
    assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 2)
    stored, parts = dense_tensors(folder / source / "global_step3"), gathered(written_state(engine._core.state()))
    if rank.rank == 0:
        found = dense_of(parts)
        assert {key.partition("/")[0] for key in found} == {"weight", "exp_avg", "exp_avg_sq"}
        assert_identical(found, {key: value.to(found[key].dtype) for key, value in stored.items()})
    assert_rounded(dense_state(engine), stored)
    assert {float(state["step"]) for state in engine.optimizer.state.values()} <= {3.0}
    losses = train(engine, num_steps=1, first=3)
    assert all(map(torch.isfinite, torch.tensor(losses)))


def assert_rounded(dense: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
    """The dense model is what was stored, in its own precision."""
    weights = {key.removeprefix("weight/"): value for key, value in stored.items() if key.startswith("weight/")}
    assert weights.keys() <= dense.keys()
    for name, value in weights.items():
        assert torch.equal(dense[name], value.to(dense[name].dtype)), name


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str | None]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return outcomes_of(
        [(run.size, name, partial(write, run, name, folder)) for name, run in WRITERS.items()],
        [
            (run.size, f"{source}-{name}", partial(read, run, source, folder))
            for name, run in READERS.items()
            for source in _sources(name, request.config)
        ],
    )


def _sources(reader: str, options: pytest.Config) -> Iterator[str]:
    """Of each reader one, so that each writer is read; all with --full."""
    first = list(READERS).index(reader)
    for index, source in enumerate(WRITERS):
        if options.getoption("--full") or (index - first) % len(WRITERS) == 3:
            yield source


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        pairs = [f"{source}-{name}" for name in READERS for source in _sources(name, metafunc.config)]
        metafunc.parametrize("pair", [*WRITERS, *pairs])


def test_layouts(pair: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[pair] is None, outcomes[pair]
