"""Every name of a host that is not its public interface, in one place, with the versions they were read in.

A test resolves them all, so that a host's new version fails by naming what disappeared, and another one looks for
names that are used and not listed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from sdp_deepspeed.messages import listed

TESTED = {"deepspeed": ("0.19.8",), "torch": ("2.13.0",), "transformers": ("5.23.0",)}

# What a training run needs. "Thing()" stands for an instance: what a constructor makes.
PRIVATE_NAMES: tuple[tuple[str, str], ...] = (
    ("deepspeed.checkpoint", "SubparamShape"),
    ("deepspeed.checkpoint.ds_to_universal", "main"),
    ("deepspeed.checkpoint.utils", "clone_tensors_for_torch_save"),
    ("deepspeed.comm", "TorchBackend.__init__"),
    ("deepspeed.comm", "all_to_all_single"),
    ("deepspeed.comm", "irecv"),
    ("deepspeed.comm", "isend"),
    ("deepspeed.runtime.base_optimizer", "ZeROOptimizer.queue_post_backward_callback"),
    ("deepspeed.runtime.base_optimizer", "ZeROOptimizer.register_grad_acc_post_hook"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.__init__"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._broadcast_model"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_basic_optimizer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_checkpointing"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_distributed_model"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_optimizer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_tensor_parallel"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_zero_optimizer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._do_optimizer_sanity_check"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._get_optimizer_param"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.allreduce_gradients"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.autotp_size"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.clip_fp32_gradients"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.communication_data_type"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.dynamic_loss_scale_args"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.get_data_types"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.load_universal_checkpoint"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.zero_allgather_bucket_size"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.zero_compute_grad_norm"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.zero_offload_optimizer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.zero_optimization_stage"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.zero_overlap_comm"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.zero_reduce_bucket_size"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.zero_use_cpu_optimizer"),
    ("deepspeed.runtime.engine", "ZERO_OPTIMIZATION"),
    ("deepspeed.runtime.fp16.loss_scaler", "CreateLossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScalerBase"),
    ("deepspeed.runtime.utils", "is_model_parallel_parameter"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.bwc", "bwc_pipeline_parallel_world_size"),
    ("deepspeed.utils.bwc", "bwc_tensor_model_parallel_group"),
    ("deepspeed.utils.bwc", "bwc_tensor_model_parallel_world_size"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("torch", "_foreach_add_"),
    ("torch", "_foreach_copy_"),
    ("torch", "_foreach_div_"),
    ("torch", "_foreach_mul_"),
    ("torch", "_foreach_norm"),
    ("torch", "_foreach_zero_"),
    ("torch", "ops.aten.add.Tensor._overloadpacket"),
    ("torch", "ops.aten.add.Tensor._schema"),
    ("torch", "UntypedStorage()._cdata"),
    ("torch", "Tensor._base"),
    ("torch", "Tensor._version"),
    ("torch._C", "DisableTorchFunctionSubclass"),
    ("torch._C", "_disabled_torch_function_impl"),
    ("torch._C", "_current_graph_task_id"),
    ("torch._C", "_swap_tensor_impl"),
    ("torch.distributed", "ProcessGroup._device_types"),
    ("torch.distributed", "ProcessGroup._get_backend"),
    ("torch.distributed.distributed_c10d", "_get_default_store"),
    ("torch.distributed.distributed_c10d", "_get_default_timeout"),
    ("torch.distributed", "ProcessGroupGloo._Options._timeout"),
    ("torch.distributed.distributed_c10d", "_set_pg_timeout"),
    ("torch.distributed.tensor", "DTensor.__create_chunk_list__"),  # what DCP asks tensors of other kinds for
    ("torch.distributed.tensor", "DTensor.__create_write_items__"),
    ("torch.nn", "Module()._buffers"),
    ("torch.nn", "Module()._call_impl"),
    ("torch.nn", "Module()._compiled_call_impl"),
    ("torch.nn", "Module()._modules"),
    ("torch.nn", "Module()._non_persistent_buffers_set"),
    ("torch.nn", "Module()._parameters"),
    ("torch.nn.init", "_no_grad_trunc_normal_"),
    ("torch.nn.modules.batchnorm", "_BatchNorm"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"),
    ("torch.utils._pytree", "tree_leaves"),
    ("torch.utils._pytree", "tree_map"),
    ("torch.utils._pytree", "tree_map_only"),
)
# What only some programs need.
PRIVATE_NAMES_OF_TOOLS: tuple[tuple[str, str], ...] = (
    ("deepspeed.runtime.config", "DeepSpeedConfig"),
    ("deepspeed.runtime.config", "DeepSpeedConfigError"),
    ("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu"),
    ("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("transformers", "PreTrainedModel._keys_to_ignore_on_load_unexpected"),
    ("transformers.conversion_mapping", "get_checkpoint_conversion_mapping"),
    ("transformers.integrations.deepspeed", "HfTrainerDeepSpeedConfig.trainer_config_finalize"),
    ("transformers.trainer", "Trainer.create_accelerator_and_postprocess"),
    ("transformers.trainer", "get_model_param_count"),
)
# Attributes that only instances have, with the module of the host that sets them.
PRIVATE_ATTRIBUTES: tuple[tuple[str, str], ...] = (
    ("deepspeed.module_inject.auto_tp", "_ds_grad_allreduce_registered"),
    ("deepspeed.runtime.bf16_optimizer", "fp32_groups_gradients_flat"),
    ("deepspeed.runtime.config", "bfloat16_config"),
    ("deepspeed.runtime.engine", "_config"),
    ("deepspeed.runtime.engine", "_is_gradient_accumulation_boundary"),
    ("deepspeed.runtime.engine", "_step_applied"),
    ("deepspeed.runtime.engine", "ds_autotp_parsed"),
    ("deepspeed.runtime.zero.stage_1_and_2", "all_grad_tensors"),
    ("deepspeed.runtime.zero.stage_1_and_2", "averaged_gradients"),
    ("deepspeed.utils.tensor_fragment", "_hp_grad"),
    ("deepspeed.utils.tensor_fragment", "_hp_mapping"),
    ("deepspeed.utils.tensor_fragment", "get_full_hp_grad"),
    ("deepspeed.utils.tensor_fragment", "get_full_hp_param"),
    ("deepspeed.utils.tensor_fragment", "set_full_hp_grad"),
    ("deepspeed.utils.tensor_fragment", "set_full_hp_param"),
    ("torch._dynamo.eval_frame", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "_checkpoint_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_impl"),
    ("torch._dynamo.eval_frame", "dynamo_ctx"),
    ("torch.optim.lr_scheduler", "_last_lr"),
    ("torch.optim.lr_scheduler", "_schedulers"),
    ("transformers.configuration_utils", "_experts_implementation"),
)
_MISSING = object()  # what is there may be None


def missing_names(names: Iterable[tuple[str, str]] = PRIVATE_NAMES) -> list[str]:
    """Those of `names` that the installed hosts do not have."""
    return [f"{module_name}.{path}" for module_name, path in names if not _exists(module_name, path)]


def _exists(module_name: str, path: str) -> bool:
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return False
    for part in path.split("."):
        target = getattr(target, part.removesuffix("()"), _MISSING)
        if target is _MISSING:
            return False
        target = target() if part.endswith("()") else target
    return True


def check_hosts() -> list[str]:
    """Warnings about untested versions.

    Raises:
        RuntimeError: a name that this package needs is not there, with the versions that have it.
    """
    if missing := missing_names(PRIVATE_NAMES):
        here = " and ".join(f"{host} {version(host)}" for host in TESTED)
        raise RuntimeError(
            f"the installed hosts lack {listed(missing)}, which sdp_deepspeed needs; tested are "
            f"{', '.join(map(_tested, TESTED))}; here are {here}"
        )
    return [
        f"{host} {version(host)} was not tested with sdp_deepspeed (tested: {_tested(host)})"
        for host in TESTED
        if version(host).split("+")[0] not in TESTED[host]
    ]


def _tested(host: str) -> str:
    return f"{host} {', '.join(TESTED[host])}"
