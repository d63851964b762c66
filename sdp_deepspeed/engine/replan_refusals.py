"""What makes re-planning impossible, by name, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.engine.apply_plan import AppliedPlan
from sdp_deepspeed.engine.start import difference
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.mixins import changed_classes
from sdp_deepspeed.masking.other_weights import OtherWeights
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED
from sdp_deepspeed.replan.catalog import Catalog

_ELSE = "or save a checkpoint and load it in an engine that is built with the new block"


def refuse_replan(engine: Any, applied: AppliedPlan, other_weights: OtherWeights) -> None:
    """
    Args:
        engine: a SubnetworkEngine.

    Raises:
        ValueError: of a run that cannot be re-planned.
        RuntimeError: now; later it can be.
    """
    if applied.dense_view.is_inside or other_weights.are_shown:
        raise RuntimeError("engine.replan inside engine.dense(): leave it first, on all ranks")
    refuse_run(engine, applied)
    if engine.optimizer.gradient_tensors():  # who counts micro-steps depends on the host; Accelerate steps once for all
        raise RuntimeError(
            "engine.replan: there are gradients of a step that has begun, which are laid out by the present plan; call "
            "it after engine.step() at the end of an accumulation, or drop them with engine.zero_grad()"
        )
    frozen = list(frozen_since_start(applied.mask))
    if frozen:
        raise ValueError(
            f"engine.replan: {quoted(frozen)} required gradients when deepspeed.initialize was called and do not now, "
            f"which the ranks that lack them could not know: let them require gradients again, {_ELSE}"
        )


def refuse_untried(applied: AppliedPlan, plan: Plan) -> None:
    """
    Raises:
        ValueError: of a plan that takes a user's description for what it was not tried out for, in a cut module.
    """
    if untried := applied.tried.untried(applied.parallel.branches, plan):
        raise ValueError(
            f"engine.replan: descriptions of your own layers are tried out at start, for the plan of the start. It did "
            f"not have {quoted(untried)}: {_SAVE}"
        )


def refuse_run(engine: Any, applied: AppliedPlan) -> None:
    """
    Raises:
        ValueError: of a run that cannot be re-planned, as far as that does not depend on the moment.
    """
    compiled = [name or "the model" for name, module in engine.module.named_modules() if _is_compiled(module)]
    if compiled:
        raise ValueError(
            f"engine.replan: {quoted(compiled)} was compiled (torch.compile) for its present shapes: {_SAVE}"
        )
    synchronized = [name for name, module in engine.module.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if synchronized:
        raise ValueError(
            f"engine.replan: {quoted(synchronized)} is a SyncBatchNorm, whose process group is the holders of the "
            f"present plan: {_SAVE}"
        )
    changed = changed_classes(engine.module)
    if changed:
        raise ValueError(
            f"engine.replan: the class of {quoted(changed)} was changed after deepspeed.initialize, by what would be "
            f"lost: change it before, {_ELSE}"
        )
    if copies := applied.dense_view.num_partial_copies():
        raise ValueError(
            f"engine.replan: {copies} copies of engine.module or of modules in it (copy.deepcopy, AveragedModel) are "
            "of this rank's subnetwork, and could not be updated from another one: export them inside "
            "engine.dense(weights=...), delete them, and copy anew afterward"
        )


_SAVE = "save a checkpoint and load it in an engine that is built with the new block"


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "dynamo_ctx")


def frozen_since_start(mask: Mask) -> Iterator[str]:
    """Parameters that this rank trains, or would."""
    model = mask.model
    for info in model.tensors:
        pieces = model.pieces[info.kind, info.name]
        is_held = any(model.rank in holders for _, holders in pieces)
        if info.trainable and is_held and not model.views.tensors[info.name].requires_grad:
            yield info.name


def check_same_block(block: SubnetworkConfig, stage: int, world: Gatherer) -> None:
    """Every rank calls it.

    Raises:
        ValueError: on all ranks: ranks gave different blocks or stages.
    """
    values = {f"{KEY}.{name}": repr(value) for name, value in block if name != "assignment" or block.plan_path is None}
    values["zero_optimization.stage"] = repr(stage)
    of_ranks = world.gather_objects(values)
    if any(own != of_ranks[0] for own in of_ranks):
        raise ValueError(difference(of_ranks))


def check_optimizer_state(catalog: Catalog, model: RankModel) -> None:
    """A rank steps elements of a param group together, so they must have the same moments.

    Raises:
        ValueError: some have none, since they never had a gradient.
    """
    kinds: dict[str, set[str]] = {}
    for key in catalog.shapes:
        kind, _, name = key.partition("/")
        kinds.setdefault(name, set()).add(kind)
    first: dict[int, str] = {}
    for info in model.tensors:
        if info.group == NOT_OPTIMIZED or info.is_whole or info.name not in kinds:
            continue
        known = first.setdefault(info.group, info.name)
        if kinds[info.name] != kinds[known]:
            raise ValueError(
                f"engine.replan: the optimizer has other state of {info.name!r} than of {known!r}, which is in the "
                "same param group (some were frozen, or never had a gradient), and one rank may step both; call it "
                "after they have been stepped"
            )
