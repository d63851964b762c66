"""How long a rank waits for others in a step, all of which live: the time limit of the run's own process group."""

from __future__ import annotations

from typing import Any


def take_limit_of_the_run(dist: Any, group: Any) -> None:
    """Give a group that was made without a time limit that of the default group; every rank of the group calls it.

    DeepSpeed's own groups get the backend's default (30 minutes for gloo), whatever `init_distributed(timeout=...)`
    was asked for. One that somebody made with another limit keeps it, and a backend without options (the fake one)
    waits for nobody.

    Args:
        dist: `torch.distributed`.
    """
    c10d, run = dist.distributed_c10d, dist.group.WORLD
    for device in set(group._device_types) & set(run._device_types):
        backend = group._get_backend(device)
        if backend.options is not None and backend.options._timeout == c10d._get_default_timeout(
            dist.Backend(backend.name())
        ):
            c10d._set_pg_timeout(run._get_backend(device).options._timeout, group)
