"""Branches of the models that most ranks train. The server from which ranks are forked imports this, so that ranks know
them already; deriving them takes up to half a second each."""

from __future__ import annotations

from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers.models import SPECIMENS, llama

MODELS = [*(llama(num_layers) for num_layers in range(1, 5)), llama(tied=True)]
MODELS += [SPECIMENS[name].build() for name in ("llama", "gpt2")]
for model in MODELS:
    proven_branches(model, "neuron")
    proven_branches(model.bfloat16(), "neuron")
