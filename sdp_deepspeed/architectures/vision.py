"""The vision families of Transformers 5.23.0, by the qualified name of their layer class.

Modules that change the shape of the stream (Swin's patch merging, ConvNeXt's down-sampling) are shared.
"""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

_QKV = tuple(Cut(f"{name}_proj", 0) for name in "qkv")
_OUT = Cut("o_proj", 1, is_output=True)
_HEADS = InnerLayers((*_QKV, _OUT), heads="num_attention_heads")
_MLP = InnerLayers((Cut("fc1", 0), Cut("fc2", 1, is_output=True)))
_GATED_MLP = InnerLayers((Cut("gate_proj", 0), Cut("up_proj", 0), Cut("down_proj", 1, is_output=True)))
_SWIGLU = "attention.config.use_swiglu_ffn"

# One dropout serves both branches; it maps zero to zero.
_VIT = (
    Branch("attention", norm="layernorm_before", body="attention", num_outputs=2, inner=_HEADS),
    Branch("mlp", norm="layernorm_after", body="mlp", inner=_MLP),
)
# The layer partitions the output of its norm into windows, and merges them before `drop_path`. Each head has a column
# of the table of relative positions.
_SWIN = (
    Branch(
        "attention",
        norm="layernorm_before",
        body="attention",
        after=("drop_path",),
        num_outputs=2,
        inner=InnerLayers(
            (*_QKV, Cut("relative_position_bias.relative_position_bias_table", 1), _OUT), heads="num_attention_heads"
        ),
    ),
    Branch("mlp", norm="layernorm_after", body="mlp", inner=_MLP),
)
# Norms are after the branches. Each head has its own scale, and an output of the network that computes the table.
_SWINV2 = (
    Branch(
        "attention",
        body="attention",
        after=("layernorm_before",),
        num_outputs=2,
        inner=InnerLayers(
            (
                *(Cut(f"self.{name}", 0) for name in ("query", "key", "value")),
                Cut("self.logit_scale", 0),
                Cut("self.continuous_position_bias_mlp.2", 0),
                Cut("output.dense", 1, is_output=True),
            ),
            heads="self.num_attention_heads",
            scaled=("self.num_attention_heads", "self.all_head_size"),
            tail=("output.dropout",),
        ),
    ),
    Branch(
        "mlp",
        body=("intermediate", "output.dense"),
        after=("output.dropout", "layernorm_after"),
        inner=InnerLayers((Cut("intermediate.dense", 0), Cut("output.dense", 1, is_output=True))),
    ),
)
# One `drop_path` serves both branches: it multiplies by a random factor.
_DINOV2 = (
    Branch("attention", norm="norm1", body="attention", after=("layer_scale1",), num_outputs=2, inner=_HEADS),
    Branch("mlp", norm="norm2", body="mlp", after=("layer_scale2",), inner=_MLP, when=((_SWIGLU, False),)),
    Branch("mlp", norm="norm2", body="mlp", after=("layer_scale2",), inner=_GATED_MLP, when=((_SWIGLU, True),)),
)
_CONVNEXT = (
    Branch(
        "layer",
        norm=("dwconv", "layernorm"),
        body=("pwconv1", "act", "pwconv2"),
        after=("drop_path",),
        inner=InnerLayers((Cut("pwconv1", 0), Cut("pwconv2", 1, is_output=True))),
        parameters=("layer_scale_parameter",),
    ),
)

# Towers of vision-language models.
_QWEN_ATTENTION = Branch(
    "attention",
    norm="norm1",
    body="attn",
    inner=InnerLayers(
        (Cut("qkv", 0, blocks=3), Cut("proj", 1, is_output=True)), heads="num_heads", scaled=("num_heads",)
    ),
)
_QWEN_MLP = InnerLayers((Cut("linear_fc1", 0), Cut("linear_fc2", 1, is_output=True)))
_QWEN2_5_VL = (_QWEN_ATTENTION, Branch("mlp", norm="norm2", body="mlp", inner=_GATED_MLP))
_QWEN3_VL = (_QWEN_ATTENTION, Branch("mlp", norm="norm2", body="mlp", inner=_QWEN_MLP))

VISION: dict[str, tuple[Branch, ...]] = {
    "transformers.models.convnext.modeling_convnext.ConvNextLayer": _CONVNEXT,
    "transformers.models.deit.modeling_deit.DeiTLayer": _VIT,
    "transformers.models.dinov2.modeling_dinov2.Dinov2Layer": _DINOV2,
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer": _DINOV2,
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionBlock": _QWEN2_5_VL,
    "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionBlock": _QWEN3_VL,
    "transformers.models.swin.modeling_swin.SwinLayer": _SWIN,
    "transformers.models.swinv2.modeling_swinv2.Swinv2Layer": _SWINV2,
    "transformers.models.vit.modeling_vit.ViTLayer": _VIT,
}
