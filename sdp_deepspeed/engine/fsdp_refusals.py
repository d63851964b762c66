"""What is refused under the FSDP of Accelerate and of Transformers' Trainer, which trains no subnetworks yet, and why.

They would pass over a block in their config, and of a model of `sdp_deepspeed.fully_shard` each rank would clip by the
norm of what it holds, step all meshes together, and save its own units.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

_INSTEAD = (
    "call sdp_deepspeed.fully_shard in a loop of your own (launch/examples/with_fsdp2.py), or train with DeepSpeed, "
    "under which the Trainer and Accelerate take the block"
)
_PREFIX = "fsdp_"  # of any key, if one likes
SHARDED: WeakSet[Any] = WeakSet()  # models of `sdp_deepspeed.fully_shard`


def refuse_block(config: Any, where: str) -> None:
    """ValueError if the config of somebody's FSDP has a block, or a near miss of its name.

    Args:
        config: loaded; or the path of a JSON file, or None.
        where: it stands, for the message.
    """
    if isinstance(config, str):
        import json
        from pathlib import Path

        from sdp_deepspeed.atomic_files import regular

        config = json.loads(regular(Path(config)).read_text(encoding="utf-8"))
    if not isinstance(config, Mapping) or not config:
        return
    from sdp_deepspeed.config import KEY, parse

    if parse({str(name).removeprefix(_PREFIX): value for name, value in config.items()}) is not None:
        raise ValueError(f"{KEY}: has no effect in {where}, whose FSDP would train the dense model: {_INSTEAD}")


def patch_trainer() -> None:
    """The Trainer refuses a block in `fsdp_config` before it makes its Accelerator."""
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
    """`Accelerator` refuses models of ours, and says under FSDP what it trains."""
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
                f"Accelerator.clip_grad_norm_: {_taken_over('a parameter')}; its function is "
                "sdp_deepspeed.fsdp.clip_grad_norm_"
            )
        return clip(self, given, *args, **kwargs)

    Accelerator.prepare, Accelerator.clip_grad_norm_ = checked_prepare, checked_clip
    Accelerator.prepare_model = checked_prepare_model


def _refuse_sharded(method: str, given: Iterable[Any]) -> None:
    if any(model is each for model in SHARDED for each in given):
        raise ValueError(f"Accelerator.{method}: {_taken_over('the model')}")


def _taken_over(what: str) -> str:
    return (
        f"{what} is of sdp_deepspeed.fully_shard, and Accelerate would take what this rank holds for all of the model, "
        f"in norms, optimizers and saved weights: {_INSTEAD}"
    )


def _tell(accelerator: Any) -> None:
    if accelerator.is_main_process:
        import logging

        from sdp_deepspeed.config import KEY

        logging.getLogger("sdp_deepspeed").warning(
            "%s: Accelerate's FSDP trains the dense model, and does not hand a block in its config file on. To train "
            "subnetworks %s",
            KEY,
            _INSTEAD,
        )


def _asks_for_fsdp(accelerator: Any) -> bool:
    """On CPUs the launcher asks for it, by a variable, and gets something else."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return launched or str(accelerator.distributed_type).endswith("FSDP")


def _is_module(value: Any) -> bool:
    """Imports nothing."""
    return any(base.__name__ == "Module" for base in type(value).__mro__)
