"""The image study: its gradients are the reference's, and learning rates are chosen on held-out training images."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.common.cells import TUNING_SEED, Store
from benchmarks.image_study import cells, file_of
from benchmarks.images.cell import Cell, Data, Settings, Training, identity
from benchmarks.images.pictures import Augmented, Examples, read_examples
from benchmarks.images.subjects import SUBJECTS, Stage, Subject
from tests.helpers.image_data import write_fashion_mnist
from tests.reference.virtual_workers import Reference

SETTINGS = Settings(rows=4, widths=(4, 8))


def examples(num: int = 32) -> Examples:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(num, 1, 28, 28, generator=generator)
    return Examples(pixels, torch.randint(10, (num,), generator=generator))


@pytest.mark.parametrize(
    "block",
    [
        {"coverage": 0.5, "redraw_interval": 1},
        {"coverage": 0.75, "branch_scale": "none"},
        {"coverage": 0.5, "strategy": "neuron"},
        {"coverage": 0.5, "regime": "backward", "redraw_interval": 1},
    ],
    ids=lambda block: " ".join(map(str, block.values())),
)
def test_gradients_are_those_of_the_reference(block: dict[str, Any]) -> None:
    training, plans = Training(Subject(6, block), Data(*[examples()] * 3), 0, SETTINGS), set()
    for step in range(2):
        plans.add(training.workers.plan.hash)
        model, workers = deepcopy(training.model), training.workers
        model.requires_grad_(True).zero_grad()
        reference = Reference(
            model,
            workers.plan,
            lambda named: torch.optim.SGD(named.values(), lr=0.1),
            lambda worker, batch: cross_entropy(worker(pixel_values=batch[0]).logits, batch[1]),
            is_scaled=workers.is_scaled,
        )
        of_workers = zip(*(tensor.chunk(4) for tensor in training.batches.batch(step)), strict=True)
        losses, gradients = reference.averaged_gradients([[batch] for batch in of_workers])
        assert training.backward() == pytest.approx(sum(loss for (loss,) in losses) / 4, rel=1e-5)
        for name, parameter in training.model.named_parameters():
            # Sums of fp32 in another order where channels are absent, relative to the largest element.
            tolerance = 1e-4 * gradients[name].abs().max().item() + 1e-6
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=tolerance)
        torch.optim.SGD(training.model.parameters(), lr=0.1).step()
    assert len(plans) == (2 if "redraw_interval" in block else 1)


def test_stochastic_depth_leaves_branches_out_and_counts_the_others() -> None:
    """The first of two equal branches runs in 3/4 of the steps, the second in half."""
    data, settings = Data(*[examples()] * 3), Settings(rows=4, widths=(4,))
    two, three = (Training(Subject(blocks), data, 0, settings).flops_per_image() for blocks in (2, 3))
    training = Training(Subject(3, dropped=0.5), data, 0, settings)
    assert training.flops_per_image() == pytest.approx(three - 0.75 * (three - two))
    assert training.depth is not None
    training.depth.leave_out([[1]] * 4)
    training.workers.backward([(examples(2).pixels, examples(2).labels)] * 4)
    names = [f"{branch.bodies[0]}.0.convolution.weight" for branch in training.workers.branches]
    gradients = [training.model.get_parameter(name).grad for name in names]
    assert [gradient is not None and bool(gradient.any()) for gradient in gradients] == [True, True, False]


def test_no_cell_trains_on_held_out_images(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path, num_train=60, num_test=5)
    train, held_out, test = read_examples(tmp_path, 50)
    assert (len(train.labels), len(held_out.labels), len(test.labels)) == (50, 10, 5)
    both = torch.cat([train.pixels, held_out.pixels]).flatten(1)
    assert len(both.unique(dim=0)) == 60
    with pytest.raises(ValueError, match="expected 1 to 50"):
        read_examples(tmp_path, 51)


def test_every_epoch_has_other_crops_of_every_image() -> None:
    data = Examples(torch.arange(8.0).view(8, 1, 1, 1).expand(8, 1, 28, 28).contiguous(), torch.arange(8))
    batches = Augmented(data, 4, seed=0)
    assert sorted(torch.cat([batches.batch(step)[1] for step in (2, 3)]).tolist()) == list(range(8))
    assert not torch.equal(batches.batch(0)[0], batches.batch(2)[0])
    for pixels, label in zip(*batches.batch(1), strict=True):
        assert pixels[0, 14, 14] == label, "the crop is of the image of the label"


def result(cell: Cell, held_out: float, test: float) -> dict[str, Any]:
    figures = {"diverged": False, "curve": [{"held_out_loss": held_out, "test_loss": test}]}
    return identity(cell, SUBJECTS[cell.subject], Settings()) | figures  # with tuples, as `run` returns it


def test_a_learning_rate_is_the_best_of_shorter_runs_on_held_out_images_and_not_at_an_end(tmp_path: Path) -> None:
    stage = Stage(("9 blocks",), 20_000, 120, (0, 1))
    held_out = {0.05: 3.0, 0.1: 2.0, 0.2: 1.0, 0.4: 0.5, 0.8: 0.7}
    store = Store(tmp_path, "image_study")
    asked = []
    for cell in islice(cells(stage, store), 20):  # no end if a cell that was added is not found
        asked.append((cell.images, cell.epochs, cell.seed, cell.rate))
        store.add(asdict(cell), result(cell, held_out[cell.rate], test=-held_out[cell.rate]), file_of(cell))
    assert asked[:-2] == [(4_000, 60, TUNING_SEED, rate) for rate in (0.1, 0.2, 0.05, 0.4, 0.8)]
    assert asked[-2:] == [(20_000, 120, seed, 0.4) for seed in (0, 1)]
    assert not [*cells(stage, Store(tmp_path, "image_study"))], "read again: nothing is left to do"
