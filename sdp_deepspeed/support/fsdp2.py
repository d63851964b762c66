"""What works with the FSDP2 host (`sdp_deepspeed.fully_shard`): the table's second host.

A row of the same name as one of table.py is about the same thing. Its path is the block's key, or the argument of
`fully_shard` that asks for it. What the block asks for is refused from here; what only a mesh, a model or an option
shows is refused in fsdp/refusals.py with the reason that stands here, which a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.support.block import BLOCK
from sdp_deepspeed.support.rows import Row, State, Tree, lookup

_FIXED = "the plan cannot change while FSDP2 holds its shards; remove the key"
# Of what the block may ask for with DeepSpeed: the rest works.
_BLOCK_REFUSED: Mapping[str, str] = {
    "backward regime": "it gathers a unit among the ranks that average it, while all ranks would run it; use "
    '"forward", or DeepSpeed',
    "coverage over time; no compiled modules": _FIXED,
    "another assignment from time to time, under the same conditions": _FIXED,
    "learning rates by coverage": "the learning rate is your optimizer's: give a unit's parameters a param group of "
    "its own",
    "bits of holders compared after each step": "each element is stored once, so holders cannot disagree; remove the "
    "key",
    "permission for unknown optimizers": "any optimizer over DTensors may step them; remove the key",
    "limit for silent ranks": "ranks are watched by the process group's own time limit; remove the key",
}


def _differs_from_default(path: str) -> Any:
    """The block's key has another value than its default."""
    name = path.removeprefix(f"{KEY}.")
    return lambda value, tree: tree[KEY][name] != SubnetworkConfig.model_fields[name].default


def _of_block(row: Row) -> Row:
    """With the state under FSDP2; what DeepSpeed's engine refuses is refused for the same reason."""
    if row.state == "refused" or row.what not in _BLOCK_REFUSED:
        return row
    return replace(row, state="refused", applies=_differs_from_default(row.path), note=_BLOCK_REFUSED[row.what])


def _row(what: str, argument: str, state: State, note: str = "") -> Row:
    return Row(what, argument, state, note=note)


_POLICY, _MESH = "mp_policy", "mesh"
_ONE_AXIS = "a unit is sharded over its holders, which are no rectangle of a mesh"
_NO_SCALE = "ranks with different units would have to agree on a loss scale; use bfloat16"

_ARGUMENTS = (
    _row("ZeRO stage 3", "", "works", "all is sharded, units over their holders"),
    _row("fp32", "", "works"),
    _row("bf16", _POLICY, "works", "over fp32 weights"),
    _row("dtype of gradients on the wire", _POLICY, "works", "reduce_dtype"),
    _row("fp16, dynamic loss scale", _POLICY, "refused", _NO_SCALE),
    _row("fp16, static loss scale", _POLICY, "refused", _NO_SCALE),
    _row("torch autocast in bf16", "", "works"),
    _row("weights that stay gathered after the forward pass", "reshard_after_forward", "works", "in training"),
    _row(
        "weights resharded over fewer ranks after the forward pass",
        "reshard_after_forward",
        "refused",
        "no number of ranks divides every holder set",
    ),
    _row("offload of parameters", "offload_policy", "works", "with gradients and optimizer"),
    _row("optimizer in host memory, stages 1 and 2", "offload_policy", "works", "with weights and gradients"),
    _row("ignored parameters, of what is shared", "ignored_params", "works", "nobody averages them"),
    _row(
        "ignored parameters, of units",
        "ignored_params",
        "refused",
        "nobody would average it over those that hold it; leave it to FSDP2, or match its unit's name in `shared`",
    ),
    _row("a mesh of several axes (HSDP, sequence or expert parallelism)", _MESH, "refused", _ONE_AXIS),
    _row("a mesh of some of the ranks (pipeline stages)", _MESH, "refused", "every rank trains a subnetwork"),
    _row("tensor parallelism (`parallelize_module` first)", _MESH, "works", "blocks; `CheckpointManager`, not DCP"),
    _row(
        "tensor parallelism of neurons and heads",
        "",
        "refused",
        "its styles divide whole layers, and pieces would be layers of their own; use "
        '"block", or DeepSpeed with AutoTP',
    ),
    _row(
        "tensor parallelism of a model without storage",
        "",
        "refused",
        "with tensor parallelism the weights must be there, since who initializes a part would not give it the dense "
        "model's values",
    ),
    _row("parameters without a dim", "", "refused", "FSDP2 cannot shard it"),
    _row("gradient accumulation by the caller", "", "works", "`set_requires_gradient_sync`"),
    _row("clipping by the dense gradient's norm", "", "works", "`sdp_deepspeed.fsdp.clip_grad_norm_`"),
    _row("activation checkpointing (Transformers', DeepSpeed's)", "", "works", "without reentry, not DeepSpeed's"),
    _row("torch.compile of the model, its layers, or by engine.compile()", "", "works", "of layers"),
    _row("model without storage (`sdp_deepspeed.Init`, or the meta device)", "", "works"),
    _row("synchronized batch norm (`SyncBatchNorm`), over the holders of a unit", "", "works", "blocks"),
    _row("optimizers of single elements", "", "works", "`param_groups` divides groups by mesh"),
    _row(
        "optimizers of whole tensors: Muon, Adafactor, Lamb",
        "",
        "untested",
        "over DTensors they have collectives of their own, on meshes that ranks do not share; nothing refuses them",
    ),
    _row("checkpoints that the other host resumes", "", "works", "`CheckpointManager`"),
)

FSDP2_TABLE: tuple[Row, ...] = tuple(_of_block(row) for row in BLOCK if row.path) + _ARGUMENTS


def refused_of_block(config: SubnetworkConfig) -> Iterator[tuple[Row, Any]]:
    """Rows that refuse what a block asks for, each with its value.

    Args:
        config: the parsed block.
    """
    tree: Tree = {KEY: config.model_dump()}
    for row in FSDP2_TABLE:
        if row.state == "refused" and row.applies is not None and row.applies(lookup(tree, row.path), tree):
            yield row, tree[KEY][row.path.removeprefix(f"{KEY}.")]


def why_refused(what: str) -> str:
    """The reason of a row."""
    return next(row.note for row in FSDP2_TABLE if row.what == what)
