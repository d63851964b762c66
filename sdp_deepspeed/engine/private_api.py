"""Every name of a host that is not its public interface, in one place, with the versions they were read in.

A test resolves them all, so that a host's new version fails by naming what disappeared.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

TESTED = {"deepspeed": ("0.19.8",), "torch": ("2.13.0",), "transformers": ("5.23.0",)}

PRIVATE_NAMES: tuple[tuple[str, str], ...] = (
    ("deepspeed.runtime.engine", "DeepSpeedEngine.__init__"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_distributed_model"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_tensor_parallel"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_optimizer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._do_optimizer_sanity_check"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_zero_optimizer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_checkpointing"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.allreduce_gradients"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.clip_fp32_gradients"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.zero_reduce_bucket_size"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.zero_optimization_stage"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.get_data_types"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.communication_data_type"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._get_optimizer_param"),
    ("deepspeed.runtime.engine", "ZERO_OPTIMIZATION"),
    ("deepspeed.runtime.base_optimizer", "ZeROOptimizer.register_grad_acc_post_hook"),
    ("deepspeed.runtime.base_optimizer", "ZeROOptimizer.queue_post_backward_callback"),
    ("deepspeed.runtime.utils", "is_model_parallel_parameter"),
    ("deepspeed.utils.bwc", "bwc_pipeline_parallel_world_size"),
    ("deepspeed.utils.bwc", "bwc_tensor_model_parallel_group"),
    ("deepspeed.utils.bwc", "bwc_tensor_model_parallel_world_size"),
    ("deepspeed.comm", "all_to_all_single"),
    ("deepspeed.checkpoint.ds_to_universal", "main"),
    ("deepspeed.checkpoint", "SubparamShape"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._broadcast_model"),
    ("torch._C", "_swap_tensor_impl"),
    ("torch.nn.init", "_no_grad_trunc_normal_"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"),
    ("torch.utils._pytree", "tree_leaves"),
    ("torch.utils._pytree", "tree_map_only"),
    ("torch", "_foreach_copy_"),
    ("torch", "_foreach_add_"),
    ("torch", "_foreach_div_"),
    ("torch", "_foreach_norm"),
    ("torch.distributed.distributed_c10d", "_get_default_store"),
)


def missing_names() -> list[str]:
    """Names of PRIVATE_NAMES that the installed hosts do not have."""
    missing: list[str] = []
    for module_name, path in PRIVATE_NAMES:
        try:
            target: Any = importlib.import_module(module_name)
        except ModuleNotFoundError:
            target = None
        for part in path.split("."):
            target = getattr(target, part, None)
        if target is None:
            missing.append(f"{module_name}.{path}")
    return missing


def check_hosts() -> list[str]:
    """Warnings about untested versions.

    Raises:
        RuntimeError: a name that this package needs is not there, with the versions that have it.
    """
    missing = missing_names()
    if missing:
        raise RuntimeError(
            f"the installed hosts lack {', '.join(missing[:5])}, which sdp_deepspeed needs; tested are "
            f"{_tested('deepspeed')}, {_tested('torch')}; here are deepspeed {version('deepspeed')} and torch "
            f"{version('torch')}"
        )
    return [
        f"{host} {version(host)} was not tested with sdp_deepspeed (tested: {_tested(host)})"
        for host in ("deepspeed", "torch")
        if version(host).split("+")[0] not in TESTED[host]
    ]


def _tested(host: str) -> str:
    return f"{host} {', '.join(TESTED[host])}"
