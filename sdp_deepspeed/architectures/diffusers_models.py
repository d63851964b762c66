"""The diffusion transformer (DiT) of Diffusers 0.42.1; Diffusers need not be installed.

The layer norm of the attention also makes the shifts, scales and gates of both branches, so it is shared.
"""

from __future__ import annotations

from sdp_deepspeed.architectures.branch import Branch, Cut, InnerLayers

_IS_DIT = (("norm_type", "ada_norm_zero"), ("attn2", None))
_DIT = (
    Branch(
        "attention",
        body="attn1",
        inner=InnerLayers(
            (*(Cut(f"to_{name}", 0) for name in "qkv"), Cut("to_out.0", 1, is_output=True)),
            heads="heads",
            scaled=("heads", "inner_dim", "inner_kv_dim"),
            tail=("to_out.1",),
        ),
        when=_IS_DIT,
    ),
    Branch(
        "mlp",
        norm="norm3",
        body="ff",
        inner=InnerLayers((Cut("net.0.proj", 0), Cut("net.2", 1, is_output=True))),
        when=_IS_DIT,
    ),
)

DIFFUSERS: dict[str, tuple[Branch, ...]] = {"diffusers.models.attention.BasicTransformerBlock": _DIT}
