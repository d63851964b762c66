"""Branches of the models that most ranks train. The server from which ranks are forked imports this, so that ranks know
them already; deriving them takes half a second each, and a second and a half for T5."""

from __future__ import annotations

from sdp_deepspeed.architectures import derivation
from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers.models import llama
from tests.helpers.oracle_grid import ARCHITECTURES, MODELS

derivation._NUM_KEPT = 64
for name in ARCHITECTURES:
    proven_branches(MODELS[name].build(), "neuron")
for build in (MODELS["llama"].build, MODELS["gpt2"].build, llama, lambda: llama(4), lambda: llama(tied=True)):
    for model in (build(), build().bfloat16()):
        proven_branches(model, "neuron")
