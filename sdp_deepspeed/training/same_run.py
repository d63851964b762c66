"""Whether a run folder's run may go on with what the command line says now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY
from sdp_deepspeed.messages import listed
from sdp_deepspeed.training.run_folder import RunFolder

# What must be the same when a run is resumed; the rest (intervals, and steps where no schedule ends with them) may
# change. So may the layout where both runs have the block: its checkpoints are of the dense model.
_FIXED = ("model", "deepspeed_config", "data", "seed", "num_ranks")
_LAYOUT = (
    "num_ranks",
    *(
        f"deepspeed_config.{key}"
        for key in (
            KEY,
            "zero_optimization",
            "tensor_parallel",
            "bf16",
            "data_types",
            "communication_data_type",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    ),
)
# Another machine may have more cores.
_FREE = ("data.workers",)
# Where `fill_automatic` writes --steps for "auto".
_SCHEDULE_LENGTH = "deepspeed_config.scheduler.params.total_num_steps"


def check_same_run(folder: RunFolder, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Refuse to go on with another model, data, seed or DeepSpeed config than the run began with.

    Args:
        config: what config.json would hold.

    Returns:
        JSON paths at which the layout differs, with what was and what is.

    Raises:
        ValueError: another difference.
    """
    old = folder.read_json("config.json")
    if old is None:
        return {}
    changed = {p: v for key in _FIXED for p, v in _differences(old.get(key), config.get(key), key).items()}
    changed = {p: v for p, v in changed.items() if p not in _FREE}
    is_ours = all(_has_block(run.get("deepspeed_config")) for run in (old, config))
    layout = {p: v for p, v in changed.items() if is_ours and p.startswith(_LAYOUT)}
    changed = {p: v for p, v in changed.items() if p not in layout}
    if list(changed) == [_SCHEDULE_LENGTH] and changed[_SCHEDULE_LENGTH] == (old.get("steps"), config.get("steps")):
        _refuse_other_steps(folder, *changed[_SCHEDULE_LENGTH])
    rows = [f"{path}: {then!r} then, {now!r} now" for path, (then, now) in changed.items()]
    if rows:
        raise ValueError(
            f"{folder.path} holds a run with other settings ({listed(rows, separator='; ')}): "
            "choose another --run-folder, remove this one, or go back to its settings"
        )
    return layout


def _has_block(deepspeed_config: Any) -> bool:
    return isinstance(deepspeed_config, Mapping) and KEY in deepspeed_config


def _refuse_other_steps(folder: RunFolder, then: int, now: int) -> None:
    raise ValueError(
        f"--steps was {then} when {folder.path} was begun and is {now} now; the learning rate's schedule ends with "
        f'it ("total_num_steps": "auto"), so the steps already made would have had other learning rates. Give '
        f'--steps {then}, write "total_num_steps": {then} in the DeepSpeed JSON to keep that schedule and go on '
        "after its end, or choose another --run-folder"
    )


def _differences(old: Any, new: Any, path: str) -> dict[str, tuple[Any, Any]]:
    """JSON paths at which two configs differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return {p: v for key in keys for p, v in _differences(old.get(key), new.get(key), f"{path}.{key}").items()}
    return {} if old == new else {path: (old, new)}
