"""Branches of the models that most ranks train. The server from which ranks are forked imports this, so that ranks know
them already; deriving them takes up to half a second each."""

from __future__ import annotations

from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers.models import SPECIMENS, llama

for build in (*(SPECIMENS[name].build for name in ("llama", "llama_odd", "llama_one_layer")), lambda: llama(4)):
    for model in (build(), build().bfloat16()):
        proven_branches(model, "neuron")
