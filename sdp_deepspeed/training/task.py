"""What a run trains, as far as the program must know: text by `text_task.py`, images by `vision/task.py`."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from sdp_deepspeed.data import PackedBatches
from sdp_deepspeed.distributed.agreement import Gatherer

Batch = dict[str, torch.Tensor]


class RunData(Protocol):
    """
    Attributes:
        train: endless batches of this rank.
        validation: held-out batches of this rank, as many as on every other; None where nothing is held out.
    """

    @property
    def train(self) -> PackedBatches: ...

    @property
    def validation(self) -> Any: ...


class Task(Protocol):
    """
    Attributes:
        items: what is counted in records and reports: "tokens" or "images".
    """

    items: str

    def check(self) -> None:
        """ValueError for settings of the data that cannot be used, before a model is built."""

    def build_model(self, *, deferred: bool) -> nn.Module:
        """The dense model with fresh weights, the same on every rank.

        Args:
            deferred: leave the weights to the engine.

        Raises:
            ValueError: one that cannot be built.
        """

    def open_data(self, engine: Any, world: Gatherer) -> RunData:
        """This rank's share, checked against the model; every rank calls it.

        Raises:
            ValueError, RuntimeError, OSError: on every rank.
        """

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Scalar mean loss of a batch, which lies on the engine's device."""

    def evaluate(self, engine: Any, data: RunData) -> dict[str, float]:
        """What `data.validation` says of the dense model: `dense_validation_loss` and more; a collective."""

    def before_export(self, engine: Any, data: RunData) -> None:
        """Whatever the dense model needs before it is saved; a collective."""

    def words(self, evaluation: dict[str, float]) -> str:
        """For people."""

    def describe(self, data: RunData) -> str:
        """What is trained on, for people."""

    def preprocessor(self, data: RunData) -> Any:
        """What is saved beside the model by its `save_pretrained(folder)`."""

    def exported(self, folder: str) -> str | None:
        """What to tell when the dense model is in `folder`; None for nothing."""
