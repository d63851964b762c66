"""Refuse the FSDP integrations of Accelerate and Transformers' Trainer, which do not support subnetworks.

They would ignore a block in their config. With a model of `sdp_deepspeed.fully_shard`, each rank would clip by the norm
of its own shards, step parameters of all meshes together, and save only its own units.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

_INSTEAD = (
    "call sdp_deepspeed.fully_shard in your own loop (launch/examples/with_fsdp2.py), or use DeepSpeed with the "
    "Trainer or Accelerate"
)
_PREFIX = "fsdp_"  # optional prefix of keys
SHARDED: WeakSet[Any] = WeakSet()  # models that `sdp_deepspeed.fully_shard` returned


def refuse_block(config: Any, where: str) -> None:
    """Raise ValueError if a config of FSDP has the block, or a key with a similar name.

    Args:
        config: loaded, or the path of a JSON file, or None.
    """
    if isinstance(config, str):
        import json
        from pathlib import Path

        from sdp_deepspeed.atomic_files import regular

        config = json.loads(regular(Path(config)).read_text(encoding="utf-8"))
    if not isinstance(config, Mapping) or not config:
        return
    from sdp_deepspeed.config import parse
    from sdp_deepspeed.messages import KEY

    if parse({str(name).removeprefix(_PREFIX): value for name, value in config.items()}) is not None:
        raise ValueError(f"{KEY}: has no effect in {where}, whose FSDP trains the dense model; {_INSTEAD}")


def patch_trainer() -> None:
    """Make the Trainer refuse a block in `fsdp_config` before it creates its Accelerator."""
    import transformers.trainer as host

    original = getattr(host.Trainer, "create_accelerator_and_postprocess", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def checked(self: Any) -> Any:
        refuse_block(getattr(self.args, "fsdp_config", None), "fsdp_config of TrainingArguments")
        return original(self)

    host.Trainer.create_accelerator_and_postprocess = checked


def patch_accelerator() -> None:
    """Make `Accelerator` refuse our models, and warn under FSDP that it trains the dense model."""
    from accelerate.accelerator import Accelerator

    prepare, prepare_model, clip = Accelerator.prepare, Accelerator.prepare_model, Accelerator.clip_grad_norm_
    if hasattr(prepare, "__wrapped__"):
        return

    @wraps(prepare)
    def checked_prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_sharded("prepare", args)
        if _asks_for_fsdp(self) and any(map(_is_module, args)):
            _tell(self)
        return prepare(self, *args, **kwargs)

    @wraps(prepare_model)
    def checked_prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_sharded("prepare_model", [model])
        return prepare_model(self, model, *args, **kwargs)

    @wraps(clip)
    def checked_clip(self: Any, parameters: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if hasattr(parameters, "grad") else list(parameters)
        ours = {id(parameter) for model in SHARDED for parameter in model.parameters()}
        if any(id(parameter) in ours for parameter in given):
            raise ValueError(
                "Accelerator.clip_grad_norm_: got a parameter of sdp_deepspeed.fully_shard; use "
                "sdp_deepspeed.fsdp.clip_grad_norm_"
            )
        return clip(self, given, *args, **kwargs)

    Accelerator.prepare, Accelerator.clip_grad_norm_ = checked_prepare, checked_clip
    Accelerator.prepare_model = checked_prepare_model


def _refuse_sharded(method: str, given: Iterable[Any]) -> None:
    if any(model is each for model in SHARDED for each in given):
        raise ValueError(
            f"Accelerator.{method}: got a model of sdp_deepspeed.fully_shard, which Accelerate does not support; "
            f"{_INSTEAD}"
        )


def _tell(accelerator: Any) -> None:
    if accelerator.is_main_process:
        import logging

        from sdp_deepspeed.messages import KEY

        logging.getLogger("sdp_deepspeed").warning(
            "%s: Accelerate's FSDP trains the dense model, and ignores a block in its config file; to train "
            "subnetworks, %s",
            KEY,
            _INSTEAD,
        )


def _asks_for_fsdp(accelerator: Any) -> bool:
    """Whether FSDP is enabled; on CPUs only the environment variable of the launcher says so."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return launched or str(accelerator.distributed_type).endswith("FSDP")


def _is_module(value: Any) -> bool:
    """Whether a value is a Module, without importing torch."""
    return any(base.__name__ == "Module" for base in type(value).__mro__)
