"""The encoder families of Transformers 5.23.0, by the qualified name of their layer class.

BERT normalizes the residual stream after each addition. That norm is shared: a rank that lacks a branch adds nothing
before it.
"""

from __future__ import annotations

from dataclasses import replace

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

# Layers with cross-attention have another branch.
_ENCODER = (("add_cross_attention", False),)
_BERT = (
    Branch(
        "attention",
        body=("attention.self", "attention.output.dense"),
        after=("attention.output.dropout",),
        num_outputs=2,
        inner=InnerLayers(
            (
                *(Cut(f"attention.self.{name}", 0) for name in ("query", "key", "value")),
                Cut("attention.output.dense", 1, is_output=True),
            ),
            heads="attention.self.num_attention_heads",
            scaled=("attention.self.num_attention_heads", "attention.self.all_head_size"),
        ),
        when=_ENCODER,
    ),
    Branch(
        "mlp",
        body=("intermediate", "output.dense"),
        after=("output.dropout",),
        inner=InnerLayers((Cut("intermediate.dense", 0), Cut("output.dense", 1, is_output=True))),
        when=_ENCODER,
    ),
)
_DEBERTA_V2 = (
    replace(
        _BERT[0],
        inner=InnerLayers(
            (
                *(Cut(f"attention.self.{name}_proj", 0) for name in ("query", "key", "value")),
                *(Cut(f"attention.self.{name}_proj", 0, optional=True) for name in ("pos_key", "pos_query")),
                Cut("attention.output.dense", 1, is_output=True),
            ),
            heads="attention.self.num_attention_heads",
            scaled=("attention.self.num_attention_heads", "attention.self.all_head_size"),
        ),
        when=(),
    ),
    replace(_BERT[1], when=()),
)
# The first layer has no norm before attention.
_MODERNBERT = (
    Branch(
        "attention",
        norm="attn_norm",
        body="attn",
        num_outputs=2,
        inner=InnerLayers(
            (Cut("Wqkv", 0, blocks=3), Cut("Wo", 1, is_output=True)),
            heads="config.num_attention_heads",
            tail=("out_drop",),
        ),
    ),
    Branch(
        "mlp",
        norm="mlp_norm",
        body="mlp",
        inner=InnerLayers((Cut("Wi", 0, blocks=2), Cut("Wo", 1, is_output=True))),
    ),
)

ENCODERS: dict[str, tuple[Branch, ...]] = {
    "transformers.models.bert.modeling_bert.BertLayer": _BERT,
    "transformers.models.camembert.modeling_camembert.CamembertLayer": _BERT,
    "transformers.models.deberta_v2.modeling_deberta_v2.DebertaV2Layer": _DEBERTA_V2,
    "transformers.models.electra.modeling_electra.ElectraLayer": _BERT,
    "transformers.models.modernbert.modeling_modernbert.ModernBertEncoderLayer": _MODERNBERT,
    "transformers.models.roberta.modeling_roberta.RobertaLayer": _BERT,
    "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaLayer": _BERT,
}
