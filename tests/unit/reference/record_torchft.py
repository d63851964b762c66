"""Records what torchft's DiLoCo does with three workers in diloco_of_torchft.json, for test_local_steps.py.

    pip install --target torchft_site torchft==0.2.0
    PYTHONPATH=torchft_site python tests/unit/reference/record_torchft.py

The workers are threads, and the manager is replaced: its all-reduce is a mean over them, and every step commits.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_WORKERS, EVERY, NUM_STEPS = 3, 3, 9
INNER = {"lr": 0.02, "weight_decay": 0.1}
OUTER = [(0.7, 0.9), (0.5, 0.6), (1.0, 0.0)]


class Exchange:
    """Means over the workers, who all call it in the same order."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_WORKERS, timeout=60)
        self._given: dict[int, torch.Tensor] = {}

    def average(self, worker: int, tensor: torch.Tensor) -> None:
        self._given[worker] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(torch.stack([self._given[other] for other in range(NUM_WORKERS)]).mean(0))
        self._barrier.wait()


class Done:
    def wait(self) -> None:
        pass


class FakeManager:
    """What DiLoCo calls of torchft's Manager."""

    _use_async_quorum = False

    def __init__(self, worker: int, exchange: Exchange) -> None:
        self._worker, self._exchange = worker, exchange

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Done:
        self._exchange.average(self._worker, tensor)
        return Done()

    def should_commit(self) -> bool:
        return True

    def current_step(self) -> int:
        return 0

    def register_state_dict_fn(self, *_: Any) -> None:
        pass

    disallow_state_dict_read = allow_state_dict_read = start_quorum = lambda self: None


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(worker: int, exchange: Exchange, start: Any, inputs: torch.Tensor, outer: tuple[float, float]) -> Any:
    """Weights of a worker after each synchronization."""
    from torchft.local_sgd import DiLoCo

    model = make_model()
    model.load_state_dict(start)
    inner = torch.optim.AdamW(model.parameters(), lr=INNER["lr"], weight_decay=INNER["weight_decay"])
    rate, momentum = outer
    sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    weights = []
    with DiLoCo(FakeManager(worker, exchange), [model], inner, sgd, sync_every=EVERY):
        for step in range(NUM_STEPS):
            inner.zero_grad()
            model(inputs[step, worker]).square().mean().backward()
            inner.step()  # synchronizes after every third
            if (step + 1) % EVERY == 0:
                weights.append([parameter.tolist() for parameter in model.parameters()])
    return weights


def main() -> None:
    torch.manual_seed(0)
    start = make_model().state_dict()
    inputs = torch.randn(NUM_STEPS, NUM_WORKERS, 2, 3)
    recorded = []
    for outer in OUTER:
        exchange = Exchange()
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            running = [pool.submit(train, w, exchange, start, inputs, outer) for w in range(NUM_WORKERS)]
            first, *others = [future.result() for future in running]
            assert all(other == first for other in others)
            recorded.append({"outer": outer, "weights": first})
    content = {
        "torchft": version("torchft"),
        "torch": torch.__version__,
        "every": EVERY,
        "inner": INNER,
        "start": {name: value.tolist() for name, value in start.items()},
        "inputs": inputs.tolist(),
        "runs": recorded,
    }
    Path(__file__).with_name("diloco_of_torchft.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
