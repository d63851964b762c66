"""The vision families of Transformers (read in 5.23.0), by the qualified name of their layer class."""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

# One dropout for both branches; it leaves a zero a zero.
_VIT = (
    Branch(
        "attention",
        norm="layernorm_before",
        body="attention",
        num_outputs=2,
        inner=InnerLayers(
            (*(Cut(f"{name}_proj", 0) for name in "qkv"), Cut("o_proj", 1, is_output=True)),
            heads="num_attention_heads",
        ),
    ),
    Branch(
        "mlp",
        norm="layernorm_after",
        body="mlp",
        inner=InnerLayers((Cut("fc1", 0), Cut("fc2", 1, is_output=True))),
    ),
)

VISION: dict[str, tuple[Branch, ...]] = {
    "transformers.models.deit.modeling_deit.DeiTLayer": _VIT,
    "transformers.models.vit.modeling_vit.ViTLayer": _VIT,
}
