"""`Team`: what `join` returns."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from sdp_deepspeed.checkpoint.hf_folder import model_facts, replaced_export, save_tensors
from sdp_deepspeed.plan.tensors import persistent_buffers
from sdp_deepspeed.teams.attendance import NO_STATE, SAVE, START, STEP
from sdp_deepspeed.teams.dense_modules import like
from sdp_deepspeed.teams.meeting_point import MeetingPoint
from sdp_deepspeed.teams.participant import Participant
from sdp_deepspeed.teams.shares import shares_by_name

_FREE = {"version of sdp_deepspeed", "local_steps", "communication_dtype"}  # may have been others in a loaded state


class Team(Participant):
    """One team of a run. All its ranks make the same calls; see `Participant` for arguments and attributes."""

    # ---- training -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Meet the other teams before the first step; collective.

        Call it when the model is wrapped, and weights and states are loaded. If no team trains yet, it waits for all
        teams, up to `wait_timeout` if all units have holders without the missing ones; they take the same initial
        weights, or the newest state. A team that comes later, or comes back, waits for the next meeting of the others,
        and goes on with their weights.

        Raises:
            RuntimeError: on all ranks of the team, if it differs from the others, or the wait is too long.
        """
        if self.has_started:
            raise RuntimeError(f"team {self.number} has started already; call start() once")
        state = self._state
        facts = (state.version, state.last, state.num_steps, state.steps_since)
        if not self._ranks.all(self._ranks.broadcast(facts) == facts):
            self.drop_state("ranks have different states, or none")
        if state.version == NO_STATE:
            self._weights.read(state.anchors)
        self._check_finite([state.anchors, state.momentum], "its first weights are not finite; the other teams go on")
        self._agreed["frozen weights"] = self._sum_of_frozen()
        is_first, timeout = self._ranks.rank == 0, self._settings.exchange_timeout
        self._point = MeetingPoint(self._address, self.number, is_first=is_first, exchange_timeout=timeout)
        self._take_part(START)
        self._changes.note()

    def _sum_of_frozen(self) -> str:
        """Checksum of the weights that no meeting changes; collective in the team."""
        of_names, checksum = shares_by_name(self._weights.shares), 0
        for name in self._mask.parameters:
            if name not in of_names:
                values = self._weights.whole(name).contiguous().flatten().view(torch.uint8).cpu()
                checksum = zlib.crc32(values.numpy().data, checksum)
        return f"{checksum:08x}"

    def step(self) -> bool:
        """Call after each step of the optimizer. Every H-th time the teams meet; collective then.

        From here to the optimizer's next step nothing else may change weights.

        Returns:
            Whether they have met.

        Raises:
            RuntimeError: weights are not finite or were changed, which ends this team, or a wait is too long.
        """
        self._check_started("step")
        self._changes.note()
        self._state.num_steps += 1
        self._state.steps_since += 1
        if self._state.steps_since < self._settings.every:
            return False
        self._take_part(STEP)
        return True

    def shard(self, dataset: Any) -> Any:
        """This team's part of a dataset: every K-th sample, or `dataset.shard` if it has that."""
        count = self.plan.num_subnetworks
        if hasattr(dataset, "shard"):
            return dataset.shard(num_shards=count, index=self.number)
        return Subset(dataset, range(self.number, len(dataset), count))

    # ---- the dense model, and checkpoints -----------------------------------------------------------------------

    def dense_state_dict(self) -> dict[str, torch.Tensor]:
        """The dense model of the anchors, fp32 in host memory, by dense name; collective in all teams.

        Returns:
            On rank 0 of each team; empty on its other ranks.
        """
        return self._state_dict_of("dense_state_dict")

    def save_pretrained(self, folder: str | PathLike[str], *, max_shard_size: str = "5GB") -> None:
        """Write the dense model of the anchors, fp32, as a Hugging Face folder; collective in all teams.

        The first of the teams that call it writes, with its rank 0. The folder has the weights of an older export,
        none, or the new ones at any moment.

        Raises:
            RuntimeError: on the ranks of the team that writes, if it cannot.
        """
        dense = self._state_dict_of(SAVE)
        problem, model = "", self._mask.model
        if dense:
            try:
                with replaced_export(Path(folder)) as written:
                    save_tensors(dense, model_facts(model), self._tied, written, max_shard_size)
            except Exception as error:  # safetensors has a kind of its own
                problem = f"save_pretrained: cannot write {folder}: {error}"
        if problem := self._ranks.broadcast(problem):
            raise RuntimeError(problem)

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Context in which the module is the dense model of the anchors, whole on each rank; for evaluation. Collective
        in all teams to enter, in the team to leave.

        Other calls of this object are refused inside. Contexts may be nested.

        Raises:
            RuntimeError: on all ranks of the team, when it leaves: weights were changed. The changes are dropped.
        """
        if self.is_dense:
            yield
            return
        with self._model.shown(self._fetch("dense")) as parameters:
            before = [parameter.detach().sum(dtype=torch.float64) for parameter in parameters]
            yield
            after = [parameter.detach().sum(dtype=torch.float64) for parameter in parameters]
        if not self._ranks.all(before == after):
            raise RuntimeError(
                f"team {self.number}: weights were changed in the dense model, which is a copy; the changes are dropped"
            )

    def _state_dict_of(self, call: str) -> dict[str, torch.Tensor]:
        dense = {}
        for name, values in self._fetch(call):
            values = self._ranks.whole(name, values)
            if self._ranks.rank == 0:
                kind = self._mask.buffers.get(name, torch.empty(0))  # parameters: fp32
                dense[name] = like(values, kind).to("cpu", copy=True)
        if dense:
            persistent = persistent_buffers(self._mask.model)
            constants = self._model.constants().items()
            dense |= {name: value.to("cpu", copy=True) for name, value in constants if name in persistent}
        return {name: dense[name] for name in self._mask.shapes if name in dense}

    def _fetch(self, call: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Fetch from other teams what this team does not store; collective in all teams.

        Yields:
            On all ranks of the teams that receive it: name and values of each dense parameter and averaged buffer.
        """
        self._check_started(call)
        result = self._take_part(call)
        if self.number not in result.attendance.receivers:
            return
        of_names = shares_by_name(self._weights.shares)
        for name in self._mask.shapes:
            if name not in of_names and name in self._mask.parameters:  # frozen on all teams
                yield name, self._weights.whole(name)
            if name not in of_names:
                continue
            dense = torch.empty(self._mask.shapes[name])
            for share in of_names[name]:
                values = result.dense[share.dense_offset : share.dense_offset + share.length]
                if share.offset is not None:
                    values = self._state.anchors[share.offset : share.offset + share.length]
                whole = self._ranks.join(name, values, torch.Size(share.shape).numel()).view(share.shape)
                share.piece.narrow(dense).copy_(whole)
            yield name, dense

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank needs beside the host's own: version, and this rank's anchors and momentum."""
        return {
            "team": self.number,
            "rank": self._ranks.rank,
            "agreed": self._agreed,
            **deepcopy(vars(self._state)),
        }

    def drop_state(self, reason: str) -> None:
        """Start without a state, in place of `load_state_dict`, and log why."""
        self._log(f"{reason}: takes over the weights of the others", is_warning=True)
        self._state.version, self._state.last, self._state.num_steps, self._state.steps_since = NO_STATE, "", 0, 0
        self._state.momentum.zero_()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same rank, before `start`. H, the outer optimizer, the dtype of communication and the
        version of the package may differ, which is logged.

        Raises:
            ValueError: it is the state of another team, rank, plan or model.
        """
        if self._point is not None:
            raise RuntimeError("load_state_dict: the team has started; load before start()")
        here = {"team": self.number, "rank": self._ranks.rank, **self._agreed}
        there = {"team": state["team"], "rank": state["rank"], **state["agreed"]}
        different = [name for name, value in here.items() if there.get(name) != value]
        wrong = [name for name in different if name not in _FREE]
        text = " and ".join(f"{name} {there.get(name)}, here it is {here[name]}" for name in wrong or different)
        if wrong:
            raise ValueError(f"load_state_dict: the state has {text}")
        if different:
            self._log(f"load_state_dict: the state has {text}", is_warning=True)
        mine = self._state
        mine.anchors.copy_(state["anchors"])
        if len(mine.momentum) and len(state["momentum"]):  # the outer optimizer may have had none
            mine.momentum.copy_(state["momentum"])
        mine.version, mine.last = state["version"], state["last"]
        mine.num_steps, mine.steps_since = state["num_steps"], state["steps_since"]
