"""Small models of families that no description names, whose branches are derived."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.helpers.models import VOCABULARY, Specimen

_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 3}
_BERT = _SIZES | {"num_attention_heads": 3, "intermediate_size": 27, "max_position_embeddings": 48}
_BERT |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
_CODEGEN: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 48, "rotary_dim": 4},
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
_MAMBA = _SIZES | {"state_size": 4, "time_step_rank": 3}

DERIVED: dict[str, Specimen] = {
    # Both branches read one norm; heads are fused in an order of their own.
    "codegen": Specimen(hf.CodeGenForCausalLM, hf.CodeGenConfig, num_layers=3, options=_CODEGEN),
    # Norms before attention, in BERT's modules: the additions are inside of output modules.
    "megatron_bert": Specimen(hf.MegatronBertForMaskedLM, hf.MegatronBertConfig, num_layers=3, options=_BERT),
    # The MLP adds the stream itself.
    "mpt": Specimen(
        hf.MptForCausalLM,
        hf.MptConfig,
        num_layers=3,
        options={"vocab_size": VOCABULARY, "d_model": 24, "n_heads": 3, "n_layers": 3, "max_seq_len": 48},
    ),
    # One branch in a layer, without attention.
    "mamba": Specimen(hf.MambaForCausalLM, hf.MambaConfig, num_layers=3, num_blocks=3, options=_MAMBA),
}
