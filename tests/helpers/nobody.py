"""A process group without peers, for what one rank does alone."""

from __future__ import annotations

from typing import Any

from sdp_deepspeed.distributed.communicator import Done


class Nobody:
    """The functions of `torch.distributed` that an exchange calls, on rank 0 of a group in which nobody else is."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_rank(self, group: Any) -> int:
        return 0

    def get_world_size(self, group: Any) -> int:
        return self.size

    def all_to_all_single(self, *arguments: Any, **options: Any) -> Done:
        return Done()
