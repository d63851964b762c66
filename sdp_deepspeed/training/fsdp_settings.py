"""What `--host fsdp2` takes from a DeepSpeed config, with the same meaning; what it cannot do is refused by name.

Keys that say how DeepSpeed stores and sends have no meaning here, since FSDP2 shards weights, gradients and optimizer
state whatever they say, and they change no result: they are passed over, and told once. All other keys that nobody
reads here are errors, unless their value leaves them switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sdp_deepspeed.config import KEY, SILENCE_LIMIT, parse
from sdp_deepspeed.messages import did_you_mean, listed, nearest
from sdp_deepspeed.support.conditions import DEFAULT_CLIPPING
from sdp_deepspeed.support.fsdp2 import refused_of_block
from sdp_deepspeed.training.batch_sizes import BATCH_SIZES, micro_steps
from sdp_deepspeed.training.fsdp_optimizer import OptimizerChoice
from sdp_deepspeed.training.fsdp_schedules import Rates, rates_of

T = TypeVar("T")
HOST = "--host fsdp2"

_READ = (
    *BATCH_SIZES,
    *("optimizer", "scheduler", "gradient_clipping", "bf16", "bfloat16", "communication_data_type", "data_types", KEY),
)
# How DeepSpeed stores, sends and logs.
_IDLE = ("zero_optimization", "steps_per_print", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
_IDLE_ZERO = (
    *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce"),
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "round_robin_gradients", "sub_group_size"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
)
_OF_A_SECTION = ("type", "params")
_OFFLOADS = ("offload_optimizer", "offload_param")
_WHY = {
    "fp16": 'it has no loss scale; take "bf16": {"enabled": true}',
    "activation_checkpointing": "take --gradient-checkpointing",
    "tensor_parallel": "call parallelize_module and sdp_deepspeed.fully_shard in a loop of your own, or take --host "
    "deepspeed",
    **dict.fromkeys(
        ("tensorboard", "wandb", "csv_monitor", "comet"), "monitors are DeepSpeed's; metrics.jsonl has every step"
    ),
}
_NO_SCHEDULE = (
    "the plan cannot change while FSDP2 holds its shards; give one coverage (the run may go on with another one: "
    "change it, and start the same command again), or take --host deepspeed"
)


@dataclass(frozen=True, kw_only=True)
class FsdpSettings:
    """
    Args:
        block: for `fully_shard`; None without subnetworks.
        micro_batch: sequences of a rank.
        accumulation: micro-steps of a step.
        optimizer: which of torch's, with its options.
        rates: learning rate by step; None leaves it as it is.
        clip: largest norm of the averaged dense gradient; 0 switches clipping off.
        bf16: parameters are gathered, and computed with, in bf16; shards stay fp32.
        reduces_in: dtype of gradients on their way, "bf16" or "fp32"; None is that in which they are computed.
        offloads: shards, gradients and optimizer state are in host memory.
        pin_memory: there page-locked.
        silence_limit: seconds; None watches nobody.
        idle: paths that were passed over.
    """

    block: Mapping[str, Any] | None
    micro_batch: int
    accumulation: int
    optimizer: OptimizerChoice
    rates: Rates | None
    clip: float
    bf16: bool
    reduces_in: str | None
    offloads: bool
    pin_memory: bool
    silence_limit: float | None
    idle: tuple[str, ...]


def read_settings(config: Mapping[str, Any], num_ranks: int) -> FsdpSettings:
    """
    Args:
        config: DeepSpeed's, whose types were checked (`refuse_wrong_types`).

    Raises:
        ValueError: all that cannot be done, each with its JSON path.
    """
    parsed = parse(config)
    block = None if parsed is None else {k: v for k, v in config[KEY].items() if k not in ("silence_limit", "enabled")}
    problems = [*refusals(config), *_refused_block(block or {})]
    batches = _tried(problems, lambda: micro_steps(config, num_ranks))
    optimizer = _tried(problems, lambda: OptimizerChoice.of(_object(config, "optimizer")))
    rates = _tried(problems, lambda: rates_of(_object(config, "scheduler")))
    if problems or batches is None or optimizer is None:
        raise ValueError(f"{HOST}: " + "\n  ".join(problems))
    zero = _object(config, "zero_optimization")
    offloads = [offload for name in _OFFLOADS if (offload := _object(zero, name)).get("device") == "cpu"]
    reduces_in = config.get("communication_data_type")
    return FsdpSettings(
        block=block,
        micro_batch=batches[0],
        accumulation=batches[1],
        optimizer=optimizer,
        rates=rates,
        clip=float(config.get("gradient_clipping", DEFAULT_CLIPPING)),
        bf16=_is_bf16(config),
        reduces_in=reduces_in and reduces_in.lower(),
        offloads=bool(offloads),
        pin_memory=any(offload.get("pin_memory", False) for offload in offloads),
        silence_limit=SILENCE_LIMIT if parsed is None else parsed.silence_limit,
        idle=tuple(_idle(config)),
    )


def refusals(config: Mapping[str, Any]) -> Iterator[str]:
    """What a run does not take of a config beside the block, each with its JSON path."""
    yield from _refused(config)
    yield from _refused_sections(config)
    yield from _refused_zero(_object(config, "zero_optimization"))
    yield from _refused_precision(config)


def _tried(problems: list[str], work: Callable[[], T]) -> T | None:
    """What it returns; its error becomes one of the problems."""
    try:
        return work()
    except ValueError as problem:
        problems.append(str(problem))
        return None


def _refused(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if name in (*_READ, *_IDLE) or _is_off(value):
            continue
        if name in _WHY:
            yield f"{name}: has no effect under {HOST}: {_WHY[name]}"
        else:
            yield f"{name}: unknown under {HOST}: {_unknown(name, _READ)}"


def _refused_block(block: Mapping[str, Any]) -> Iterator[str]:
    """What `fully_shard` would refuse after the model was built."""
    if block.get("schedule") is not None:
        yield f"{KEY}.schedule: {_NO_SCHEDULE}"
    elif (parsed := parse({KEY: dict(block)}) if block else None) is not None:
        yield from (f"{row.path}: got {value!r} ({row.what}): {row.note}" for row, value in refused_of_block(parsed))


def _refused_sections(config: Mapping[str, Any]) -> Iterator[str]:
    for section in ("optimizer", "scheduler"):
        given = _object(config, section)
        for name in given:
            if name not in _OF_A_SECTION and not _is_off(given[name]):
                yield f"{section}.{name}: {did_you_mean(name, _OF_A_SECTION)}"
    scheduler = _object(config, "scheduler")
    if scheduler.get("params") and scheduler.get("type") is None:
        yield "scheduler.type: there is none"


def _refused_zero(zero: Mapping[str, Any]) -> Iterator[str]:
    for name, value in zero.items():
        path = f"zero_optimization.{name}"
        if name == "stage" and value not in range(4):
            yield f"{path}: got {value!r}, expected 0, 1, 2 or 3"
        if name in _IDLE_ZERO or _is_off(value):
            continue
        if name not in _OFFLOADS:
            yield f"{path}: unknown under {HOST}: {_unknown(name, (*_IDLE_ZERO, *_OFFLOADS))}"
            continue
        if not isinstance(value, Mapping) or value.get("device") != "cpu":
            yield f'{path}: got {value!r}, expected {{"device": "cpu"}} or {{"device": "none"}}'
        elif not isinstance(value.get("pin_memory", False), bool):
            yield f"{path}.pin_memory: got {value['pin_memory']!r}, expected true or false"
        elif others := sorted(value.keys() - {"device", "pin_memory"}):
            yield f"{path}: {listed(others)}: no effect with FSDP2, which moves all shards; remove it"


def _refused_precision(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("bf16", "bfloat16"):
        if not isinstance(enabled := _object(config, name).get("enabled", False), bool):
            yield f"{name}.enabled: got {enabled!r}, expected true or false"
        for key in [key for key, value in _object(config, name).items() if key != "enabled" and not _is_off(value)]:
            why = "has no effect with FSDP2, whose shards are the fp32 masters; remove it"
            yield f"{name}.{key}: {_near(key, ('enabled',)) or why}"
    if str(config.get("communication_data_type")).lower() == "fp16":
        yield 'communication_data_type: got "fp16", expected "fp32" or "bf16"'
    for name, value in _object(config, "data_types").items():
        if name != "grad_accum_dtype":
            yield f"data_types.{name}: has no effect with FSDP2; remove it"
        elif value not in (None, "fp32"):
            yield f'data_types.{name}: got {value!r}, expected "fp32", in which FSDP2 adds gradients up'


def _unknown(name: str, known: Collection[str]) -> str:
    return _near(name, known) or "remove it, or take --host deepspeed"


def _near(name: str, known: Collection[str]) -> str:
    """A question, or nothing."""
    near = nearest(name, known, cutoff=0.8)
    return f"did you mean {near!r}?" if near else ""


def _idle(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _IDLE:
        if name in config and name != "zero_optimization":
            yield name
    for name in _object(config, "zero_optimization"):
        if name not in _OFFLOADS:
            yield f"zero_optimization.{name}"


def _is_bf16(config: Mapping[str, Any]) -> bool:
    return any(_object(config, name).get("enabled", False) for name in ("bf16", "bfloat16"))


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What stands there; nothing if it is absent, null, or no object, which DeepSpeed takes for some."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_off(value: Any) -> bool:
    """Whether a key says no more than that something is not to be done."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or value.get("device") == "none" or all(map(_is_off, value.values()))
    return value is None or value is False or value == []
