"""A user's script in a process of its own: `python import_hook_user.py <folder> <what is imported first>`; prints JSON.

Every entry is the class of the engine that came out, or the error. One rank, so that it needs no launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = {"subnetwork_data_parallel": {"coverage": 1.0}}


def settings(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        **more,
    }


def import_in_order(first: str) -> Callable[..., Any]:
    """`deepspeed.initialize` as a user may have got hold of it."""
    if first == "deepspeed":
        from deepspeed import initialize

        import sdp_deepspeed
    else:
        import sdp_deepspeed  # noqa: F401

        assert "torch" not in sys.modules, "import sdp_deepspeed must be light"
        import importlib.util

        from transformers import LlamaForCausalLM  # noqa: F401  (asks whether DeepSpeed is there)

        assert importlib.util.find_spec("deepspeed") is not None
        import deepspeed.runtime.engine
        from deepspeed import initialize

        spec: Any = deepspeed.__spec__
        assert spec.loader.get_filename() == deepspeed.__file__, "the module must look as if nobody had touched it"
    return initialize


def outcome(work: Callable[[], Any]) -> str:
    try:
        engine = work()[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{type(engine).__name__} {type(engine.optimizer).__name__}"


def main(folder: Path, first: str) -> None:
    initialize = import_in_order(first)
    import torch.distributed as dist
    from deepspeed.pipe import PipelineModule
    from torch import nn

    from tests.helpers.models import llama

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)

    def start(config: Any = None, *, model: Any = None, **options: Any) -> str:
        model = llama() if model is None else model
        return outcome(lambda: initialize(model=model, model_parameters=model.parameters(), config=config, **options))

    path = folder / "ds.json"
    path.write_text(json.dumps(settings(**BLOCK)))
    switched_off = {"subnetwork_data_parallel": {"enabled": False}}
    results = {
        "block": start(settings(**BLOCK)),
        "plain": start(settings()),
        "switched off": start(settings(**switched_off)),
        "path": start(str(path)),
        "args": start(args=argparse.Namespace(deepspeed_config=str(path), local_rank=0)),
        "near miss": start(settings(subnetworks_data_parallel={"coverage": 1.0})),
        "hybrid": start(settings(hybrid_engine={"enabled": True}, **BLOCK)),
        "pipeline": start(settings(**BLOCK), model=PipelineModule([nn.Linear(4, 4)], num_stages=1)),
        "no optimizer": start({key: value for key, value in settings(**BLOCK).items() if key != "optimizer"}),
        "plain after all": start(settings()),
    }
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    main(Path(sys.argv[1]), sys.argv[2])
