"""torchft's DiLoCo between nodes, FSDP2 inside of them, behind the calls of DeepSpeed's engine.

torchft's servers (lighthouse, manager) are left out: nobody joins or fails, so each synchronization is committed, and
the mean over nodes is gloo's all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.common.contestants import PlainEngine
from benchmarks.common.device import device, seconds
from benchmarks.common.ranks import num_nodes


class _Manager:
    """What DiLoCo calls of torchft's Manager.

    Args:
        peers: the ranks that have the same shard, one on each node.
    """

    _use_async_quorum = False

    def __init__(self, peers: dist.ProcessGroup) -> None:
        self._peers = peers

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> dist.Work:
        work = dist.all_reduce(tensor.div_(self._peers.size()), group=self._peers, async_op=True)
        assert work is not None
        return work

    def should_commit(self) -> bool:
        return True

    def current_step(self) -> int:
        return 0

    def register_state_dict_fn(self, *_: Any) -> None:
        pass

    def start_quorum(self) -> None:
        pass

    disallow_state_dict_read = allow_state_dict_read = start_quorum


class DiLoCoEngine(PlainEngine):
    """Trains with AdamW inside a node, and averages weights over nodes every `every` steps. Every rank builds it.

    Args:
        schedule: arguments of DeepSpeed's WarmupCosineLR.

    Attributes:
        seconds_synchronizing: total time of synchronizations, waiting for other nodes included.
    """

    def __init__(self, module: Any, *, rate: float, every: int, **schedule: Any) -> None:
        from torchft.local_sgd import DiLoCo  # of the extra "benchmarks"

        shape = (num_nodes(), dist.get_world_size() // num_nodes())
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=("nodes", "node"))
        for part in (*module.model.layers, module):
            fully_shard(part, mesh=mesh["node"])
        optimizer = torch.optim.AdamW(module.parameters(), lr=rate, fused=False)
        super().__init__(module, module, optimizer, stage=3)
        self.scheduler = WarmupCosineLR(optimizer, **schedule)
        self.seconds_synchronizing = self._start = 0.0
        outer = torch.optim.SGD(module.parameters(), lr=1.0)  # weights become their mean
        optimizer.register_step_post_hook(self._begin)  # hooks run in this order
        DiLoCo(_Manager(mesh["nodes"].get_group()), [module], optimizer, outer, sync_every=every).__enter__()
        optimizer.register_step_post_hook(self._end)

    def step(self) -> None:
        super().step()
        self.scheduler.step()

    def _begin(self, *_: Any) -> None:
        self._start = seconds()

    def _end(self, *_: Any) -> None:
        self.seconds_synchronizing += seconds() - self._start
