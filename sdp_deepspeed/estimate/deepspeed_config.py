"""Settings of a DeepSpeed config that estimates depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from sdp_deepspeed.config import parse
from sdp_deepspeed.config.schedule import Schedule, fill_total_steps
from sdp_deepspeed.estimate.deepspeed_bytes import DeepSpeedSetup, Precision
from sdp_deepspeed.estimate.fsdp2_bytes import FSDP2Setup
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.parallel.optimizer_kinds import check_optimizer

_MANY_STEPS = 10**6  # if the number of steps is unknown; large enough for every phase to have some
# fp32 moments of each element, by the optimizer's name in lower case; 2 for the rest.
_MOMENTS = {"sgd": 0, "lion": 1, "adagrad": 1, "fusedlion": 1, "deepspeedcpulion": 1, "deepspeedcpuadagrad": 1}


class _Part(BaseModel):
    """A key that is missing or null has its default."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Switch(_Part):
    enabled: bool = False


class _Optimizer(_Part):
    type: str = "AdamW"
    params: dict[str, Any] = {}


class _Device(_Part):
    device: str | None = None


class _Zero(_Part):
    stage: Literal[0, 1, 2, 3] = 0
    reduce_bucket_size: Annotated[int | float, Field(ge=1)] | None = None
    offload_optimizer: Annotated[_Device, BeforeValidator(lambda value: value or {})] = _Device()
    offload_param: Annotated[_Device, BeforeValidator(lambda value: value or {})] = _Device()


class _DataTypes(_Part):
    grad_accum_dtype: str | None = None


class _TensorParallel(_Part):
    autotp_size: Literal[0, 1] = 1


class Settings(_Part):
    """Keys of a DeepSpeed config that determine memory and traffic."""

    train_batch_size: PositiveInt | None = None
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    zero_optimization: _Zero = _Zero()
    optimizer: _Optimizer = _Optimizer()
    bf16: _Switch = _Switch()
    fp16: _Switch = _Switch()
    torch_autocast: _Switch = _Switch()
    data_types: _DataTypes = _DataTypes()
    tensor_parallel: _TensorParallel = _TensorParallel()

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Dtype of the weights."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def optimizer_name(self) -> str:
        """`optimizer.type` in lower case."""
        return self.optimizer.type.lower()

    @property
    def moments(self) -> int:
        """fp32 moments per element."""
        has_momentum = bool(self.optimizer.params.get("momentum"))
        return 1 if self.optimizer_name == "sgd" and has_momentum else _MOMENTS.get(self.optimizer_name, 2)

    def wire_bytes(self, default: int) -> int:
        """Bytes of an element of the gradient on the wire."""
        wire = self.communication_data_type
        return default if wire is None else 4 if wire == "fp32" else 2

    def micro_steps(self, num_ranks: int) -> tuple[int, int]:
        """Micro-batch size per rank and number of micro-steps.

        Raises:
            ValueError: batch sizes are missing or contradict each other.
        """
        whole, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        accumulation = self.gradient_accumulation_steps
        if micro is None and whole is not None:
            micro = whole // (num_ranks * (accumulation or 1))
        if not micro:
            raise ValueError("train_micro_batch_size_per_gpu: missing; set it, or a larger train_batch_size")
        if accumulation is None:
            accumulation = 1 if whole is None else whole // (micro * num_ranks)
        if whole is not None and whole != micro * accumulation * num_ranks:
            raise ValueError(
                f"train_batch_size: got {whole}, but {num_ranks} ranks x micro-batch {micro} x {accumulation} "
                f"micro-steps is {micro * accumulation * num_ranks}"
            )
        return micro, accumulation


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Read a DeepSpeed config without "auto".

    Raises:
        ValueError: a value of the wrong type, or a setting that cannot be estimated.
    """
    given = {key: value for key, value in config.items() if value is not None}
    if "bfloat16" in given:
        given.setdefault("bf16", given["bfloat16"])
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        problems = [
            f"deepspeed.{'.'.join(map(str, item['loc'])).removesuffix('.int')}: got {item['input']!r}, {item['msg']}"
            for item in error.errors(include_url=False)
        ]
        raise ValueError("; ".join(problems)) from None
    try:
        check_optimizer(settings.optimizer.type, allow=False)
    except ValueError as error:
        raise ValueError(f"deepspeed.optimizer.type: {error}") from None
    if settings.optimizer_name == "muon":
        raise ValueError("deepspeed.optimizer.type: Muon cannot be estimated; use AdamW, whose state is larger")
    return settings


def without_auto(
    config: Mapping[str, Any], *, micro_batch: int, accumulation: int, dtype: Literal["fp32", "bf16", "fp16"]
) -> dict[str, Any]:
    """Replace "auto" by the values of the Trainer where an estimate depends on it, and drop other keys with "auto"."""
    sizes = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}
    filled: dict[str, Any] = dict(config) | {key: size for key, size in sizes.items() if config.get(key) == "auto"}
    for name in ("bf16", "fp16"):
        if isinstance(filled.get(name), Mapping) and filled[name].get("enabled") == "auto":
            filled[name] = {**filled[name], "enabled": dtype == name}
    block = filled.pop(KEY, None)  # its "auto" has a meaning of its own
    filled = _dropped_auto(filled) | ({} if block is None else {KEY: block})
    fill_total_steps(filled, _MANY_STEPS)
    return filled


def _dropped_auto(tree: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tree.items() if value != "auto"}
    return {key: _dropped_auto(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def configs_of_phases(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Configs of the phases of a schedule, without the schedule; the config itself if it has none.

    Raises:
        ValueError: an invalid block, or a schedule whose number of steps is not known.
    """
    schedule = None if parse(config) is None else Schedule.of(config)
    if schedule is None:
        return [config]
    return [schedule.config_after(phase.first_step - 1) for phase in schedule.phases]


def deepspeed_setup(config: Mapping[str, Any], accumulation: int) -> DeepSpeedSetup:
    settings = read_settings(config)
    zero, size = settings.zero_optimization, 4 if settings.dtype == "fp32" else 2
    gradients = 4 if settings.data_types.grad_accum_dtype == "fp32" else size
    return DeepSpeedSetup(
        stage=zero.stage,
        precision=Precision(size, gradients, settings.wire_bytes(size), settings.moments),
        accumulation=accumulation,
        offload=zero.offload_optimizer.device == "cpu",
        bucket_elements=None if zero.reduce_bucket_size is None else int(zero.reduce_bucket_size),
    )


def fsdp2_setup(config: Mapping[str, Any], accumulation: int) -> FSDP2Setup:
    """Settings for FSDP2. Shards are fp32; bf16 means a mixed-precision policy.

    Raises:
        ValueError: see `read_settings`, or a setting that FSDP2 does not support.
    """
    from sdp_deepspeed.fsdp.refused_arguments import refused_of_block

    settings = read_settings(config)
    block = parse(config)
    refused = [] if block is None else list(refused_of_block(block))
    if settings.dtype == "fp16":
        refused.append('fp16: FSDP2 has no loss scaling; use "bf16": {"enabled": true}')
    zero = settings.zero_optimization
    if zero.offload_optimizer.device in ("cpu", "nvme") or zero.offload_param.device in ("cpu", "nvme"):
        refused.append("zero_optimization: offload cannot be estimated under FSDP2; remove it")
    if refused:
        raise ValueError(f"FSDP2: {'; '.join(refused)}")
    compute = 2 if settings.dtype == "bf16" else 4
    wire = settings.wire_bytes(compute)
    return FSDP2Setup(compute=compute, wire=wire, num_moments=settings.moments, accumulation=accumulation)
