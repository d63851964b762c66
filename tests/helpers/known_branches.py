"""Branches of the models that most ranks train. The server from which ranks are forked imports this, so that ranks know
them already; deriving them takes half a second each, and a second and a half for T5."""

from __future__ import annotations

from sdp_deepspeed.architectures import derivation
from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers.models import llama
from tests.helpers.oracle_grid import ARCHITECTURES, MODELS

derivation._NUM_KEPT = 64
for build in (
    *(MODELS[name].build for name in ("llama", *ARCHITECTURES)),
    llama,
    lambda: llama(4),
    lambda: llama(tied=True),
):
    model = build()
    proven_branches(model, "neuron")
    proven_branches(model.bfloat16(), "neuron")
