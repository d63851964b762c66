"""The image study on four ranks: its virtual workers train what ranks do."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.images.cell import Data, Settings, Training, block_of, build
from benchmarks.images.pictures import Examples
from benchmarks.images.subjects import Subject
from sdp_deepspeed.config import KEY
from tests.helpers.ranks import Rank

pytestmark = [pytest.mark.world(4), pytest.mark.slow]

SETTINGS = Settings(rows=8, widths=(4, 8))
SUBJECT = Subject(8, {"coverage": 0.5, "redraw_interval": 2})
OPTIMIZER: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": True}


def test_real_ranks_have_the_losses_of_virtual_workers(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(0)
    examples = Examples(torch.randn(64, 1, 28, 28, generator=generator), torch.randint(10, (64,), generator=generator))
    training = Training(SUBJECT, Data(examples, examples, examples), 0, SETTINGS)
    optimizer = torch.optim.SGD(training.model.parameters(), **OPTIMIZER)
    config = {
        "train_micro_batch_size_per_gpu": SETTINGS.rows,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1 by default
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": OPTIMIZER},
        "zero_optimization": {"stage": 1},
        KEY: block_of(SUBJECT, 0),
    }
    engine = deepspeed.initialize(model=build(SUBJECT, 0, SETTINGS), config=config)[0]
    for step in range(5):
        expected = training.backward()
        optimizer.step()
        pixels, labels = (tensor.chunk(SETTINGS.workers)[rank.rank] for tensor in training.batches.batch(step))
        loss = cross_entropy(engine(pixel_values=pixels).logits, labels)
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / SETTINGS.workers
        dist.all_reduce(mean)
        # After the first step, whether an activation is above zero depends on rounding.
        assert mean.item() == pytest.approx(expected, rel=0.02 if step else 1e-4)
