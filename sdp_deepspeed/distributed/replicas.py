"""Do ranks that must have the same tensors have the same bits?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.messages import listed


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()


def differing_replicas(tensors: Mapping[str, torch.Tensor], communicator: Communicator) -> str:
    """Names of tensors that are not the same on all ranks of a group, for people; empty if all are. Every rank of the
    group calls it with the same names."""
    digests = communicator.gather_objects({name: digest(tensor) for name, tensor in tensors.items()})
    names = [name for name in digests[0] if any(own.get(name) != digests[0][name] for own in digests)]
    return listed(names)
