"""The sharded optimizer with local steps: a step is that of a team. Averages over teams are synchronizer.py's.

The dense model is that of the anchors, in checkpoints as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sdp_deepspeed.config import LocalSteps
from sdp_deepspeed.parallel.buckets import Bucket
from sdp_deepspeed.parallel.consistency import gather_objects, run_on_all_ranks
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.parallel.offload import move_to_host
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.parallel.synchronizer import Synchronizer, drop_momenta, teams_of

if TYPE_CHECKING:
    from sdp_deepspeed.masking.mask import Mask


class LocalOptimizer(ShardedOptimizer):
    """As `ShardedOptimizer`; the groups are those of `group_sets`.

    Args:
        settings: `local_steps` of the block.
        options: those of `ShardedOptimizer`.

    Attributes:
        team_size: ranks of this rank's team.
    """

    local: Synchronizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mask: Mask,
        groups: Groups,
        param_groups: Mapping[str, int],
        *,
        settings: LocalSteps,
        **options: Any,
    ) -> None:
        teams = teams_of(mask.plan.subnetwork_of_rank)
        super().__init__(optimizer, mask, groups, param_groups, teams=teams, **options)
        self.team_size = len(teams[groups.rank])
        self.local = Synchronizer(settings, self.held, groups, teams, options.get("wire_dtype"))

    def step(self, loss_scale: float = 1.0, *, check_overflow: bool = False) -> bool:
        """As in `ShardedOptimizer`; collective of the team."""
        self._refuse_offloaded("step()")
        self.local.is_between = True
        return super().step(loss_scale, check_overflow=check_overflow)

    def _gather(self, *, reuse_gradients: bool = False) -> None:
        """All-gather weights that are equal on all holders: over the team, and then, in the backward regime, from all
        holders to the ranks of other teams. Collective of all ranks."""
        self._gather_shards(reuse_gradients=reuse_gradients)
        for gathered in self._gathers:
            gathered.all_gather(
                self.groups.data_parallel, self.mask.view, reuse_gradients=reuse_gradients, are_in_module=True
            )

    @torch.no_grad()
    def synchronize(self, call: str) -> None:
        """Average weights over teams, take the outer step, and gather weights as after a step without local steps.
        Collective of all ranks, between two steps.

        Args:
            call: name of the call, for messages.

        Raises:
            RuntimeError: on all ranks, if weights are not finite, or gradients of an unfinished step exist.
        """

        def check() -> None:
            self.refuse_unfinished(call)
            self.local.check_finite(self.mask.plan.subnetwork_of_rank[self.groups.rank])

        self._refuse_offloaded("synchronize()")
        self._restore_views()
        run_on_all_ranks(check, self.groups.control)
        self.local.synchronize()
        self._gather()

    @property
    def bytes_per_synchronization(self) -> int:
        """Bytes that this rank sends to other teams in a synchronization: differences, and in the backward regime the
        weights that other teams do not train."""
        num_others = self.groups.data_parallel.size - self.team_size
        weights = sum(gathered.size * gathered.buckets[0].layout.dtype.itemsize for gathered in self._gathers)
        return self.local.sent_bytes + num_others * weights

    def describe(self) -> str:
        """Text on rank 0: its team, and how often it sends how much."""
        if self.team_size == self.groups.data_parallel.size:
            return f"there is one team, so nothing is averaged every {self.local.settings.every} steps"
        team = f"{self.team_size} rank{'s' * (self.team_size > 1)}"
        sent = f"{self.bytes_per_synchronization / 1e6:.3g} MB to other teams each time"
        return f"teams of {team}, synchronized every {self.local.settings.every} steps; rank 0 sends {sent}"

    # ---- the dense model -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def enter_dense(self) -> None:
        """Between two synchronizations, make the module's weights those of the anchors; collective of the team."""
        if self.local.is_between:
            self._refuse_offloaded("the dense model")
            self._restore_views()
            self.local.show()
            self._gather_shards(reuse_gradients=False)

    @torch.no_grad()
    def leave_dense(self) -> None:
        """Undo `enter_dense`, or else update the shards.

        Raises:
            RuntimeError: on all ranks, if weights were changed while they were the anchors; the changes are dropped.
        """
        if not self.local.are_shown:
            self.refresh_shards()
            return
        is_changed = False
        for index, bucket in enumerate(self.held):
            self._read_module(bucket)
            is_changed |= bucket.differs_from_shard() or self.local.differs(index)
            bucket.drop_weights()
        self.local.hide()
        is_changed = any(gather_objects(is_changed, self.groups.control))
        if is_changed and self.regime == "backward":  # restore what this rank's team does not step
            self.local.show()
            self._gather()
            self.local.hide()
        self._gather_shards(reuse_gradients=False)
        if is_changed:
            raise RuntimeError(
                "local steps: weights were changed in the dense model between two synchronizations, and have their "
                "earlier values again; call engine.synchronize() before such a change"
            )

    def dense_values(self, bucket: Bucket, parameter: torch.Tensor) -> torch.Tensor:
        """The anchor of a parameter of a bucket that the optimizer steps."""
        if self.local.are_shown:
            return parameter
        anchors = bucket.stepped(self.local.anchors[self.held.index(bucket)])
        return next(anchor for each, anchor in zip(bucket.parameters, anchors, strict=True) if each is parameter)

    def refresh_shards(self) -> None:
        """As in `ShardedOptimizer`; sets the anchors, too.

        Raises:
            RuntimeError: between two synchronizations.
        """
        if self.local.is_between:
            raise RuntimeError(
                "local steps: weights were changed between two synchronizations; call engine.synchronize() before that"
            )
        super().refresh_shards()
        self.local.restart()

    # ---- checkpoints and re-planning -------------------------------------------------------------------------------

    def gather_weights(self) -> None:
        """As in `ShardedOptimizer`; the loaded weights are the anchors."""
        self.local.restart()
        self.local.load_momenta(self.optimizer)
        super().gather_weights()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which weights are loaded: what a file lacks has the values of the last synchronization then, not
        those of this rank's team; the outer momentum stays, unless optimizer state is loaded. If nothing is loaded,
        nothing changes."""
        self.local.add_momenta(self.optimizer)
        if self.local.is_between:
            self.local.show()
        try:
            yield
        finally:
            if self.local.are_shown:
                self.local.hide()
            drop_momenta(self.optimizer)

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Context in which boxes are equal on all teams and have all state: moments are averaged, and the outer
        momentum is one of them. After a synchronization; collective."""
        self.local.average_moments(self.optimizer)
        self.local.add_momenta(self.optimizer)
        try:
            yield
        finally:
            drop_momenta(self.optimizer)

    def offload_states(self, *, states: bool = True, masters: bool = True, pin_memory: bool = False) -> None:
        """As in `ShardedOptimizer`; anchors and outer momentum follow the masters."""
        super().offload_states(states=states, masters=masters, pin_memory=pin_memory)
        if masters:
            self._moved += move_to_host([*self.local.anchors, *self.local.momenta], pin_memory=pin_memory)
