"""The families of timm 1.0.31, by the qualified name of their layer class; timm need not be installed.

ViT, DeiT and DINO consist of `vision_transformer.Block`. MLPs whose gates are in one matrix, and attention with a norm
over all heads, are blocks only. ResNets with further modules in their branches (squeeze and excitation) are not
described.
"""

from __future__ import annotations

from torch import nn

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

_OUT = Cut("proj", 1, is_output=True)
_QKV = (Cut("qkv", 0, blocks=3), Cut("gate", 0, optional=True))
# Plain, or with a gate (SwiGLU).
_INNER = tuple(Cut(name, 0, optional=True) for name in ("fc1", "fc1_g", "fc1_x"))
_MLP = InnerLayers((*_INNER, Cut("fc2", 1, is_output=True)), tail=("drop2",))
_UNCUT_NORM = "its attention normalizes over all heads"


def _attention(norm: type[nn.Module]) -> Branch:
    """Attention of a ViT, with or without a norm over all heads."""
    inner = InnerLayers(
        (*_QKV, _OUT),
        heads="num_heads",
        scaled=("num_heads", "attn_dim"),
        tail=("proj_drop",),
        per_head=("q_norm", "k_norm"),
    )
    is_cut = norm is nn.Identity
    return Branch(
        "attention",
        norm="norm1",
        body="attn",
        after=("ls1", "drop_path1"),
        inner=inner if is_cut else None,
        uncut_reason="" if is_cut else _UNCUT_NORM,
        when=(("attn.norm", norm),),
    )


_VIT = (
    _attention(nn.Identity),
    _attention(nn.LayerNorm),
    Branch("mlp", norm="norm2", body="mlp", after=("ls2", "drop_path2"), inner=_MLP),
)
# The layer partitions the output of its norm into windows, and merges them before `drop_path1`. Each head has a column
# of the table of relative positions.
_SWIN = (
    Branch(
        "attention",
        norm="norm1",
        body="attn",
        after=("drop_path1",),
        inner=InnerLayers(
            (Cut("qkv", 0, blocks=3), Cut("relative_position_bias_table", 1), _OUT),
            heads="num_heads",
            scaled=("num_heads",),
            tail=("proj_drop",),
        ),
    ),
    Branch("mlp", norm="norm2", body="mlp", after=("drop_path2",), inner=_MLP),
)
_SWIN_V2 = (
    Branch(
        "attention",
        body="attn",
        after=("norm1", "drop_path1"),
        uncut_reason="timm's attention takes the width of a head from that of the residual stream",
    ),
    Branch("mlp", body="mlp", after=("norm2", "drop_path2"), inner=_MLP),
)
_CONVNEXT = (
    Branch(
        "layer",
        norm=("conv_dw", "norm"),
        body="mlp",
        after=("drop_path",),
        inner=_MLP,
        bypassed=(("shortcut", nn.Identity),),
        parameters=("gamma",),
    ),
)


def _resnet(last: int, *, drop_path: bool) -> Branch:
    """Cut like ResNet in `convolutional.py`: channels before the last convolution."""
    first = tuple(f"{kind}{index}" for index in range(1, last) for kind in ("conv", "bn"))
    return Branch(
        "convolution",
        body=(*first, f"conv{last}"),
        after=(f"bn{last}", "drop_path") if drop_path else (f"bn{last}",),
        inner=InnerLayers(
            (Cut(f"conv{last - 1}", 0), Cut(f"bn{last - 1}", 0), Cut(f"conv{last}", 1, is_output=True)),
            before=first[:-2],
        ),
        when=(("se", None), ("drop_path", nn.Module if drop_path else None)),
        bypassed=(("downsample", None),),
    )


def _resnets(last: int) -> tuple[Branch, ...]:
    return _resnet(last, drop_path=False), _resnet(last, drop_path=True)


TIMM: dict[str, tuple[Branch, ...]] = {
    "timm.models.convnext.ConvNeXtBlock": _CONVNEXT,
    "timm.models.resnet.BasicBlock": _resnets(2),
    "timm.models.resnet.Bottleneck": _resnets(3),
    "timm.models.swin_transformer.SwinTransformerBlock": _SWIN,
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": _SWIN_V2,
    "timm.models.vision_transformer.Block": _VIT,
}
