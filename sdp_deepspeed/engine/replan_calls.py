"""`engine.replan`: another plan for a live run, as if a checkpoint were saved and loaded under it, but in memory.

All that can be refused is refused before anything is changed. What a rank has of weights, masters and moments stays
until its share under the new plan is there, so that at most both states are in memory, and two buckets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from deepspeed.utils import log_dist

from sdp_deepspeed.checkpoint.state.fill import make_targets
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState, merged
from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks, persistent_buffers
from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator, RankGroups
from sdp_deepspeed.distributed.last_acts import LastActs
from sdp_deepspeed.distributed.monitored_barrier import Phase
from sdp_deepspeed.engine.apply_plan import ChosenPlan, install_dense_view, tell
from sdp_deepspeed.engine.consistency import check_same_plan
from sdp_deepspeed.engine.deepspeed_settings import network_of, optimizer_settings, resolved_config
from sdp_deepspeed.engine.dense_calls import DenseCalls
from sdp_deepspeed.engine.dense_export import install_save
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
from sdp_deepspeed.replan.share import Share
from sdp_deepspeed.replan.transfer import Transfer
from sdp_deepspeed.sizes import bytes_text
from sdp_deepspeed.support.refusals import refuse_unsupported, without_effect


@dataclass(frozen=True)
class Replanned:
    """What a re-plan cost.

    Args:
        sent_bytes: by this rank.
        all_sent_bytes: by all ranks.
        least_bytes: that all ranks together had to get: what each has under the new plan and did not have before.
        seconds: on this rank.
    """

    sent_bytes: int
    all_sent_bytes: int
    least_bytes: int
    seconds: float

    def __str__(self) -> str:
        moved, least = bytes_text(self.all_sent_bytes), bytes_text(self.least_bytes)
        return f"re-planned in {self.seconds:.2f} s: {moved} moved, of which {least} had to"


@dataclass(frozen=True)
class _Before:
    """What is read before anything changes.

    Args:
        state: of this rank.
        catalog: of all ranks.
        optimizer: as `OptimizerState.metadata`.
    """

    state: OwnState
    catalog: Catalog
    optimizer: Mapping[str, Any]


class ReplanCalls(DenseCalls):
    """The part of `SubnetworkEngine` that users call to change the plan."""

    block: SubnetworkConfig
    dp_group: Communicator
    config: Any
    _groups: RankGroups
    _last_acts: LastActs
    _is_half_replanned = False

    def _refuse_resident(self, call: str) -> None:
        self._refuse_half_replanned(call)
        super()._refuse_resident(call)

    def _refuse_half_replanned(self, call: str) -> None:
        if self._is_half_replanned:
            raise RuntimeError(
                f"{call} after engine.replan ended half-way in an error, which left weights and optimizer state "
                "unfinished: end this run, and start it again from its last checkpoint"
            )

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
        return self._replan(run_on_all_ranks(self.world, partial(self._new_config, block, stage)), stage)

    def _new_config(self, block: Mapping[str, Any], stage: int | None) -> dict[str, Any]:
        return new_config(self.config, block, stage)

    def _replan(self, given: dict[str, Any], stage: int | None) -> Replanned:
        """
        Args:
            given: DeepSpeed's config from now on, the same on all ranks.
        """
        begin = time.monotonic()
        with self._at_stage(stage):
            config, chosen = self._agree(given)
            before = self._before(chosen)
            self._is_half_replanned = True
            with torch.no_grad(), self._last_acts.doing("its re-plan"):
                sent, least = self._change(chosen, config, before)
            self._is_half_replanned = False
        del before
        give_back(self.device)
        self.block, self.config = config, given
        tell(chosen, self.world.rank)
        all_sent, all_least = map(sum, zip(*self.world.gather_objects((sent, least)), strict=True))
        result = Replanned(sent, all_sent, all_least, time.monotonic() - begin)
        log_dist(f"{KEY}: {result}", ranks=[0])
        return result

    def _agree(self, given: Mapping[str, Any]) -> tuple[SubnetworkConfig, ChosenPlan]:
        """The block of a config and its plan, of which all ranks have tried what could be refused; every rank calls
        it."""
        config = run_on_all_ranks(self.world, partial(self._check, given))
        check_same_block(config, self.zero_optimization_stage(), self.world)
        network = network_of(self, self._groups)
        chosen = run_on_all_ranks(self.world, partial(self._choose, config, network))
        check_same_plan(chosen.plan, self.world)
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
        refuse_rates(self.optimizer.optimizer, config.lr_by_coverage)
        refuse_replan(self, self._applied, self._other_weights)
        self._known_parameters.check()
        self.checkpointer.wait()
        for warning in without_effect(config, ds_config):
            log_dist(warning, ranks=[0])
        return config

    def _choose(self, config: SubnetworkConfig, network: Any) -> ChosenPlan:
        """The plan, of which everything was tried that could be refused."""
        applied = self._applied
        with applied.mask.shaped_as_built():
            chosen = ChosenPlan.of(self.module, config, network, applied.parallel, self.dp_group.size)
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
        return chosen.rank_model(self.module, marked, self._applied.parallel, self.dp_group.rank)

    def _before(self, chosen: ChosenPlan) -> _Before:
        """The state of now; all ranks call it."""
        rank_chunks = self._all_chunks()
        optimizer = OptimizerState(self.optimizer, rank_chunks)
        counts = merged(self.world.gather_objects(optimizer.counts()))
        is_same = _layout(chosen.plan) == _layout(self._applied.plan)
        state = run_on_all_ranks(self.world, partial(OwnState.of, rank_chunks, optimizer, own_buffers=is_same))
        catalog = Catalog.gather(state.owned, self.dp_group)
        assert not (gaps := list(catalog.gaps())), f"nobody has some elements of {gaps}, or two ranks do"
        run_on_all_ranks(self.world, partial(check_optimizer_state, catalog, self.optimizer.model))
        return _Before(state, catalog, optimizer.metadata(counts))

    def _all_chunks(self) -> RankChunks:
        """As `rank_chunks`, with buffers of units that state dicts do not have: they go where their unit goes."""
        model = self.optimizer.model
        of_units = {piece.parameter for unit in model.plan.units for piece in unit.pieces if piece.kind == "buffer"}
        return RankChunks(model, persistent_buffers(self.module, model.views.shapes, also=of_units))

    def _change(self, chosen: ChosenPlan, config: SubnetworkConfig, before: _Before) -> tuple[int, int]:
        """Take the module and the optimizer apart, put them together under the plan, and fill them.

        Returns:
            Bytes that this rank sent, and those that it had to get.
        """
        applied = self._applied
        applied.dense_view.uninstall()
        self.optimizer.uninstall()
        without = applied.mask.undo()
        unmix(self.module)
        model = self._rank_model(chosen)
        mask = Mask(self.module, model, applied.parallel.branches, scales=_scales(config))
        mask.apply()
        give_storage(without.values())
        options = self.device, config.evaluation
        dense_view = install_dense_view(self.module, mask, self.dp_group, applied.barrier, options)
        self._applied = replace(applied, plan=chosen.plan, mask=mask, dense_view=dense_view)
        self._other_weights = OtherWeights(self.module, mask)
        install_save(self._export())
        self.optimizer.lay_out_anew(model, optimizer_settings(self, config))
        return self._fill(before)

    def _fill(self, before: _Before) -> tuple[int, int]:
        rank_chunks, catalog = self._all_chunks(), before.catalog
        optimizer = OptimizerState(self.optimizer, rank_chunks)
        targets = make_targets(
            rank_chunks, optimizer, catalog.metadata(), strict=True, optimizer_metadata=before.optimizer
        )
        places = ((key, *part) for state in targets.chunks for key, chunks in state.items() for part in chunks.items())
        share = Share.of(places, before.state.local, catalog)
        share.copy()
        transfer = Transfer(self.dp_group, device=self.device, bucket_bytes=self._bucket_bytes())
        transfer.run(share, before.state.owned, catalog)
        assert targets.state is not None
        optimizer.restore_in_place(targets.state, before.optimizer)
        return transfer.sent_bytes, share.num_bytes(catalog)

    def _bucket_bytes(self) -> int:
        """Of fp32 elements in the optimizer's buckets."""
        model, given = self.optimizer.model, self.optimizer.settings.bucket_elements
        optimized = [info for info in model.tensors if info.group != NOT_OPTIMIZED]
        return 4 * (given or default_bucket_elements(optimized, model.plan))


def _layout(plan: Plan) -> tuple[str, tuple[int, ...]]:
    return plan.hash, tuple(plan.subnetwork_of_rank)


def _scales(config: SubnetworkConfig) -> bool:
    return config.dense_branch_scale == "coverage"
