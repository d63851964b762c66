"""What the Trainer of Transformers says of a run: whose loss it logs, and how many parameters the model has."""

from __future__ import annotations

from functools import wraps
from math import prod
from typing import Any

_NAMES = {"loss": "subnetwork_loss", "train_loss": "train_subnetwork_loss"}


def patch_trainer() -> None:
    """Label training losses as what they are, and count the dense model's parameters; for engines of ours only."""
    import transformers.trainer as host

    log, count = host.Trainer.log, getattr(host, "get_model_param_count", None)
    if count is None or hasattr(count, "__wrapped__"):  # gone, of which our engine tells; or patched before
        return

    @wraps(log)
    def labelled_log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if is_ours(self.model_wrapped) and self.model_wrapped.plan.trains_subnetworks:
            logs.update({label: logs[name] for name, label in _NAMES.items() if name in logs})
        return log(self, logs, *args, **kwargs)

    @wraps(count)
    def dense_count(model: Any, trainable_only: bool = False) -> Any:
        return num_parameters(model, trainable_only) if is_ours(model) else count(model, trainable_only)

    host.Trainer.log, host.get_model_param_count = labelled_log, dense_count


def num_parameters(engine: Any, trainable_only: bool) -> int:
    """Of the dense model, whatever this rank has of it."""
    chunks = engine.rank_chunks()
    infos = (info for info in engine.optimizer.model.tensors if info.trainable or not trainable_only)
    return sum(prod(chunks.shape(info.name)) for info in infos)


def is_ours(model: Any) -> bool:
    """Whether a model is an engine of ours; imports nothing."""
    return "SubnetworkEngine" in {base.__name__ for base in type(model).__mro__}
