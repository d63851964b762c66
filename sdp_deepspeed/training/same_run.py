"""Whether a run folder's run may go on with what the command line says now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY
from sdp_deepspeed.messages import listed
from sdp_deepspeed.training.options import HOSTS
from sdp_deepspeed.training.run_folder import RunFolder

# What must be the same when a run is resumed; the rest (intervals, and steps where no schedule ends with them) may
# change. So may the layout where both runs have the block or are under FSDP2: checkpoints are of the dense model then.
_FIXED = ("model", "deepspeed_config", "data", "seed", "num_ranks", "host", "label_smoothing")
_LAYOUT = (
    "num_ranks",
    "host",
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
_PHASES, _PHASES_LENGTH = f"deepspeed_config.{KEY}.schedule", f"deepspeed_config.{KEY}.total_steps"
# Where `fill_automatic` writes --steps: what would be wrong with others, and what stays if a user writes it down.
_LENGTHS = {
    "deepspeed_config.scheduler.params.total_num_steps": (
        'the learning rate\'s schedule ends with it ("total_num_steps": "auto"), so the steps already made would have '
        "had other learning rates",
        "that schedule and go on after its end",
    ),
    _PHASES_LENGTH: (
        "phases end at fractions of it, so some of the steps already made would have been in others",
        "those phases and go on in the last one",
    ),
}


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
    old, config = ({"host": HOSTS[0], **run} for run in (old, config))  # earlier versions knew no other
    changed = {p: v for key in _FIXED for p, v in _differences(old.get(key), config.get(key), key).items()}
    changed = {p: v for p, v in changed.items() if p not in _FREE}
    is_ours = all(map(_saves_dense_model, (old, config)))
    layout = {p: v for p, v in changed.items() if is_ours and p.startswith(_LAYOUT)}
    lengths = _lengths_in_steps(changed, (old.get("steps"), config.get("steps")))
    changed = {p: v for p, v in changed.items() if p not in layout}
    if lengths and not changed.keys() - lengths:
        _refuse_other_steps(folder, lengths[0], old["steps"], config["steps"])
    rows = [f"{path}: {then!r} then, {now!r} now" for path, (then, now) in changed.items()]
    if rows:
        raise ValueError(
            f"{folder.path} holds a run with other settings ({listed(rows, separator='; ')}): "
            "choose another --run-folder, remove this one, or go back to its settings"
        )
    return layout


def _saves_dense_model(run: Mapping[str, Any]) -> bool:
    deepspeed_config = run.get("deepspeed_config")
    return run.get("host") == "fsdp2" or (isinstance(deepspeed_config, Mapping) and KEY in deepspeed_config)


def _lengths_in_steps(changed: Mapping[str, Any], steps: tuple[Any, Any]) -> list[str]:
    """Paths at which --steps was, and is, what a schedule's length is; not where that schedule is another one, too."""
    paths = [path for path in _LENGTHS if changed.get(path) == steps]
    return [path for path in paths if not (path == _PHASES_LENGTH and _PHASES in changed)]


def _refuse_other_steps(folder: RunFolder, path: str, then: int, now: int) -> None:
    why, kept = _LENGTHS[path]
    raise ValueError(
        f"--steps was {then} when {folder.path} was begun and is {now} now; {why}. Give --steps {then}, write "
        f'"{path.rpartition(".")[2]}": {then} in the DeepSpeed JSON to keep {kept}, or choose another --run-folder'
    )


def _differences(old: Any, new: Any, path: str) -> dict[str, tuple[Any, Any]]:
    """JSON paths at which two configs differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return {p: v for key in keys for p, v in _differences(old.get(key), new.get(key), f"{path}.{key}").items()}
    return {} if old == new else {path: (old, new)}
