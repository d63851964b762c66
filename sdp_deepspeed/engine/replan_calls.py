"""`engine.replan`: another plan for a live run, as if a checkpoint were saved and loaded under it, but in memory.

All that can be refused is refused before anything is changed. What a rank has of weights, masters and moments stays
until its share under the new plan is there, so that at most both states are in memory, and two buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from deepspeed.utils import log_dist

from sdp_deepspeed.checkpoint.state.fill import make_targets
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks, persistent_buffers
from sdp_deepspeed.checkpoint.state.trained_state import RankState
from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.distributed.agreement import Among, Gatherer, run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.last_acts import LastActs
from sdp_deepspeed.distributed.monitored_barrier import Meetings, Phase
from sdp_deepspeed.engine.apply_plan import ChosenPlan, install_dense_view, tell
from sdp_deepspeed.engine.consistency import check_same_plan
from sdp_deepspeed.engine.deepspeed_settings import nodes_of_ranks, optimizer_settings, resolved_config
from sdp_deepspeed.engine.dense_calls import DenseCalls
from sdp_deepspeed.engine.dense_export import install_save
from sdp_deepspeed.engine.half_way import who_ended_is_named, wholly_or_never
from sdp_deepspeed.engine.new_config import new_block, new_config
from sdp_deepspeed.engine.replan_refusals import check_optimizer_state, check_same_block, refuse_replan, refuse_untried
from sdp_deepspeed.layout.buckets import default_bucket_elements
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.freed_memory import give_back
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.mixins import unmix
from sdp_deepspeed.masking.other_weights import OtherWeights
from sdp_deepspeed.masking.part import give_storage
from sdp_deepspeed.optimizer.learning_rates import refuse_rates
from sdp_deepspeed.optimizer.whole_tensors import mark_whole
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED
from sdp_deepspeed.replan.catalog import Catalog, OwnState
from sdp_deepspeed.replan.cost import Moved, Replanned
from sdp_deepspeed.replan.share import Share
from sdp_deepspeed.replan.transfer import Transfer
from sdp_deepspeed.support.refusals import refuse_unsupported, without_effect
from sdp_deepspeed.tensor_parallel.checks import refuse_uneven


@dataclass(frozen=True)
class _Before:
    """What is read before anything changes.

    Args:
        state: of this rank.
        catalog: of all data-parallel ranks.
        optimizer: as `OptimizerState.metadata`.
        is_same: whether the plan is that of before.
        buffers: as `_all_chunks` takes them.
    """

    state: OwnState
    catalog: Catalog
    optimizer: Mapping[str, Any]
    is_same: bool
    buffers: frozenset[str]


class ReplanCalls(DenseCalls):
    """The part of `SubnetworkEngine` that users call to change the plan.

    Attributes:
        last_replan: what the last one cost; None before the first.
    """

    last_replan: Replanned | None = None
    block: SubnetworkConfig
    dp_group: Communicator
    config: Any
    _last_acts: LastActs

    def replan(self, block: Mapping[str, Any], *, stage: int | None = None) -> Replanned:
        """Go on under another plan, from the end of a step; all ranks call it with the same keys.

        The dense model, fp32 masters and moments are the same numbers afterward, wherever they are; step counts, the
        learning rate, the loss scale, data and random numbers go on. The engine, its optimizer, the wrapped one, param
        groups and Parameters stay the objects that they are. A Parameter may have another shape than before.

        Args:
            block: keys of the config's block that change. Not `allow_optimizer`, `silence_limit` and `checkpoint`.
            stage: ZeRO's from now on, 0, 1 or 2; None leaves it.

        Returns:
            What moved, and how long it took.

        Raises:
            ValueError, RuntimeError: on all ranks, before anything is changed: what is wrong with the block, or what
                makes re-planning impossible now. On ranks that wait, if a rank does not call it.
        """
        self._refuse_half_replanned("engine.replan")
        self._applied.dense_view.meet(Phase.REPLAN)
        return self._replan(run_on_all_ranks(self._meetings, partial(self._new_config, block, stage)), stage)

    def _new_config(self, block: Mapping[str, Any], stage: int | None) -> dict[str, Any]:
        return new_config(self.config, block, stage)

    @property
    def _meetings(self) -> Meetings:
        """Where all ranks agree on a re-plan; who fails or dies is named there."""
        return Meetings(self._applied.barrier, Phase.REPLAN)

    def _groups(self) -> tuple[Gatherer, Gatherer | None]:
        """The data-parallel group, and the tensor-parallel one if there is one; all ranks gather together, as above."""
        ranks, dp, tp = self._meetings, self.dp_group, self._applied.parallel.communicator
        index = 0 if tp is None else tp.rank
        of_replica = None if tp is None else Among(ranks, dp.rank, rank=index, size=tp.size)
        return Among(ranks, index, rank=dp.rank, size=dp.size), of_replica

    def _replan(self, given: dict[str, Any], stage: int | None, *, tells: bool = True) -> Replanned:
        """
        Args:
            given: DeepSpeed's config from now on, the same on all ranks.
            tells: whether another plan is printed.
        """
        begin, ranks = time.monotonic(), self._meetings
        with self._at_stage(stage):
            config, chosen = self._agree(given)
            before = self._before(chosen, ranks)
            self._is_half_replanned = True
            with torch.no_grad(), wholly_or_never(self.module, self._last_acts):
                moved = self._change(chosen, config, before, ranks)
            self._is_half_replanned = False
        is_same = before.is_same
        del before
        give_back(self.device)
        self.block, self.config = config, given
        if not is_same:
            tell(chosen, self.world.rank, table=tells, rows=False)
        result = Replanned.of(moved, ranks, begin=begin)
        log_dist(f"{KEY}: {result}", ranks=[0])
        self.last_replan = result
        return result

    def _agree(self, given: Mapping[str, Any]) -> tuple[SubnetworkConfig, ChosenPlan]:
        """The block of a config and its plan, of which all ranks have tried what could be refused; every rank calls
        it."""
        ranks = self._meetings
        config = run_on_all_ranks(ranks, partial(self._check, given))
        check_same_block(config, self.zero_optimization_stage(), ranks)
        nodes = nodes_of_ranks(*self._groups())
        chosen = run_on_all_ranks(ranks, partial(self._choose, config, nodes))
        check_same_plan(chosen.plan, ranks)
        return config, chosen

    @contextmanager
    def _at_stage(self, stage: int | None) -> Iterator[None]:
        """DeepSpeed's engine asks its config for the stage; an error takes it back."""
        before = self.zero_optimization_stage()
        self._set_stage(int(before if stage is None else stage))
        try:
            yield
        except BaseException:
            self._set_stage(before)
            raise

    def _set_stage(self, stage: int) -> None:
        config: Any = self._config
        config.zero_config.stage = stage
        config.zero_optimization_stage, config.zero_enabled = stage, stage > 0

    def _check(self, given: Mapping[str, Any]) -> SubnetworkConfig:
        config, ds_config = new_block(given, self.block), resolved_config(given, self._config)
        refuse_unsupported(config, ds_config)
        refuse_uneven(self._applied.parallel.shards, self.zero_optimization_stage())
        refuse_rates(self.optimizer.optimizer, config.lr_by_coverage)
        refuse_replan(self, self._applied, self._other_weights)
        self._known_parameters.check()
        self.checkpointer.wait()
        for warning in without_effect(config, ds_config):
            log_dist(warning, ranks=[0])
        return config

    def _choose(self, config: SubnetworkConfig, nodes: Any) -> ChosenPlan:
        """The plan, of which everything was tried that could be refused."""
        applied = self._applied
        with applied.mask.shaped_as_built():
            chosen = ChosenPlan.of(self.module, config, nodes, applied.parallel, self.dp_group.size)
            refuse_untried(applied, chosen.plan)
            model = self._rank_model(chosen)
            Mask(self.module, model, applied.parallel.branches, scales=_scales(config)).check()
        return chosen

    def _rank_model(self, chosen: ChosenPlan) -> RankModel:
        """With the param groups of its tensors; the module has their dense shapes."""
        optimizer, tensors = self.optimizer, self.optimizer.model.tensors
        model = chosen.rank_model(self.module, tensors, self._applied.parallel, self.dp_group.rank)
        every_group = optimizer.settings.whole_tensors
        marked = mark_whole(tensors, model, optimizer.optimizer, every_group=every_group)
        model = chosen.rank_model(self.module, marked, self._applied.parallel, self.dp_group.rank)
        model.views.formats = self._applied.model.views.formats  # which stand-ins do not have
        return model

    def _before(self, chosen: ChosenPlan, ranks: Gatherer) -> _Before:
        """The state of now; all ranks call it."""
        is_same = _layout(chosen.plan) == _layout(self._applied.plan)
        buffers = _buffers_of_units(chosen.plan) | _buffers_of_units(self._applied.plan)

        def read() -> tuple[OptimizerState, OwnState, list[Any]]:
            rank_chunks = self._all_chunks(buffers)
            optimizer = OptimizerState(self.optimizer, rank_chunks)
            return optimizer, OwnState.of(rank_chunks, optimizer, own_buffers=is_same), optimizer.counts()

        optimizer, state, own_counts = run_on_all_ranks(ranks, read)
        counts = ranks.gather_objects(own_counts)
        catalog = run_on_all_ranks(ranks, partial(self._catalog, state))
        run_on_all_ranks(ranks, partial(check_optimizer_state, catalog, self.optimizer.model))
        return _Before(state, catalog, optimizer.metadata(counts), is_same, buffers)

    def _catalog(self, state: OwnState) -> Catalog:
        """Data-parallel ranks among themselves: it is large, and concerns no others."""
        with who_ended_is_named(self._applied.barrier):
            catalog = Catalog.gather(state.owned, self.dp_group)
        gaps = list(catalog.gaps(self._applied.parallel.shards))
        assert not gaps, f"nobody has some elements of {gaps}, or two ranks do"
        return catalog

    def _all_chunks(self, buffers: frozenset[str]) -> RankChunks:
        """As `rank_chunks`, with buffers of units that state dicts do not have: they go where their unit goes.

        Args:
            buffers: in units of the plan before, or of the one after; in the other they may be shared.
        """
        model = self.optimizer.model
        return RankChunks(model, persistent_buffers(self.module, model.views.shapes, also=buffers))

    def _change(self, chosen: ChosenPlan, config: SubnetworkConfig, before: _Before, ranks: Gatherer) -> Moved:
        """Take the module and the optimizer apart, put them together under the plan, and fill them. On an error of one
        rank all agree, but while values travel: who waits for it there hears of it (`wholly_or_never`)."""
        run_on_all_ranks(ranks, partial(self._rebuild, chosen, config))
        share, restore = run_on_all_ranks(ranks, partial(self._share, before))
        transfer = Transfer(self.dp_group, device=self.device, bucket_bytes=self._bucket_bytes())
        with who_ended_is_named(self._applied.barrier):
            transfer.run(share, before.state.owned, before.catalog)
        run_on_all_ranks(ranks, restore)
        return Moved(transfer.sent_bytes, transfer.asked_bytes, share.num_bytes(before.catalog))

    def _rebuild(self, chosen: ChosenPlan, config: SubnetworkConfig) -> None:
        applied = self._applied
        applied.dense_view.uninstall()
        self.optimizer.uninstall()
        without = applied.mask.undo()
        unmix(self.module)
        model = self._rank_model(chosen)
        mask = Mask(self.module, model, applied.parallel.branches, scales=_scales(config))
        mask.apply()
        give_storage(without, model.views.formats)
        options = self.device, config.evaluation
        dense_view = install_dense_view(self.module, mask, self.dp_group, applied.barrier, options)
        self._applied = replace(applied, plan=chosen.plan, mask=mask, dense_view=dense_view, coverage=chosen.coverage)
        self._other_weights = OtherWeights(self.module, mask)
        install_save(self._export())
        self.optimizer.lay_out_anew(model, optimizer_settings(self, config))

    def _share(self, before: _Before) -> tuple[Share, Callable[[], None]]:
        """What this rank has under the plan, as far as it comes from itself; and what is to be done when the rest is
        there."""
        rank_chunks, catalog = self._all_chunks(before.buffers), before.catalog
        optimizer = OptimizerState(self.optimizer, rank_chunks)
        state = RankState(rank_chunks, optimizer)
        targets = make_targets(state, catalog.metadata(), strict=True, optimizer_metadata=before.optimizer)
        places = ((key, *part) for state in targets.chunks for key, chunks in state.items() for part in chunks.items())
        share = Share.of(places, before.state.local, catalog)
        share.copy()
        assert targets.state is not None
        return share, partial(optimizer.restore_in_place, targets.state, before.optimizer)

    def _bucket_bytes(self) -> int:
        """Of fp32 elements in the optimizer's buckets."""
        model, given = self.optimizer.model, self.optimizer.settings.bucket_elements
        optimized = [info for info in model.tensors if info.group != NOT_OPTIMIZED]
        return 4 * (given or default_bucket_elements(optimized, model.plan))


def _layout(plan: Plan) -> tuple[str, tuple[int, ...]]:
    return plan.hash, tuple(plan.subnetwork_of_rank)


def _buffers_of_units(plan: Plan) -> frozenset[str]:
    return frozenset(piece.parameter for unit in plan.units for piece in unit.pieces if piece.kind == "buffer")


def _scales(config: SubnetworkConfig) -> bool:
    return config.dense_branch_scale == "coverage"
