"""What a host does for this program: DeepSpeed, or FSDP2 without it."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from torch import nn

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.training.options import Options


class Host(Protocol):
    """
    Attributes:
        log: of the host.
        user_errors: with which it tells mistakes, beside ValueError and OSError.
    """

    log: logging.Logger
    user_errors: tuple[type[Exception], ...]

    def start(self) -> None:
        """Process group and device; every rank calls it."""

    def check(self) -> None:
        """ValueError for a config that the host cannot read, before a model is built."""

    def build(self, model: nn.Module) -> tuple[Any, Gatherer]:
        """An engine and all ranks, which are watched from then on; every rank calls it."""

    def close(self) -> None:
        """Leave the process group, so that no rank is seen to vanish."""


def host_of(options: Options) -> Host:
    """The one that the command line names, which alone is imported."""
    if options.host == "fsdp2":
        from sdp_deepspeed.training.fsdp_host import FsdpHost

        return FsdpHost(options)
    from sdp_deepspeed.training.deepspeed_host import DeepSpeedHost

    return DeepSpeedHost(options)
