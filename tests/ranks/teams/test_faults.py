"""Teams that are killed, come late, differ, or make mistakes; the others go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import sdp_deepspeed
from sdp_deepspeed.teams import participant
from sdp_deepspeed.teams.exchange import Exchange
from sdp_deepspeed.teams.meeting_point import MeetingPoint
from tests.helpers.models import LENGTH, VOCABULARY, llama, loss_of
from tests.helpers.ports import free_port
from tests.helpers.ranks import forkserver_context
from tests.helpers.teams import NEVER_MISSED, Place, Teams, serve_lighthouse, teams

PATIENCE = 200.0  # seconds that others are waited for, where that is not what is tested


def block(num_teams: int, coverage: float = 1.0, wait_timeout: float = PATIENCE) -> dict[str, Any]:
    steps = {"teams": num_teams, "every": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "wait_timeout": wait_timeout}
    return {"coverage": coverage, "local_steps": steps}


class Run:
    """A team that trains a small model."""

    def __init__(self, place: Place, settings: dict[str, Any]) -> None:
        self.place, self.num_steps = place, 0
        model: Any = llama(seed=place.team)  # each with other weights, of which those of the first holders remain
        self.team = sdp_deepspeed.join(model, settings)
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step(self) -> bool:
        """Train one step; whether teams have met."""
        seed = self.team.num_steps * 100 + self.place.team * 10 + self.place.rank
        batch = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        loss_of(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return self.team.step()

    def meet(self) -> None:
        while not self.step():
            pass

    def meet_until(self, version: int) -> None:
        while self.team.version < version:
            self.meet()

    def spoil(self) -> None:
        """By the optimizer's next step."""
        self.optimizer.param_groups[0]["lr"] = torch.nan

    def save_dense(self) -> None:
        """Save what each team has of the dense model of the same anchors."""
        dense = self.team.dense_state_dict()
        if dense:
            torch.save(dense, self.place.folder / f"dense-{self.place.team}.pt")


def dense_of(folder: Path, number: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"dense-{number}.pt")


def assert_equal(folder: Path, numbers: range) -> None:
    """All teams have the same dense model, bit by bit; each has what it holds from itself."""
    first = dense_of(folder, numbers[0])
    for number in numbers[1:]:
        other = dense_of(folder, number)
        assert all(torch.equal(other[name], value) for name, value in first.items())


# ---- killed, and back -----------------------------------------------------------------------------------------------

PHASES: dict[str, tuple[Any, str]] = {
    "before a meeting": (participant.Participant, "_checked_deltas"),
    "when it is here": (MeetingPoint, "connect"),
    "in the exchange": (Exchange, "average"),
    "in the second exchange": (Exchange, "copy"),
    "when it has finished": (Exchange, "confirm"),
    "before it decides": (MeetingPoint, "decide"),
    "when it has decided": (participant.Result, "take_over"),
}


def fail_once() -> None:
    """The next exchange fails here, when it has succeeded on all other ranks."""
    average = Exchange.average

    def fail(exchange: Exchange, bucket: Any, deltas: Any, means: torch.Tensor) -> None:
        setattr(Exchange, "average", average)  # noqa: B010
        average(exchange, bucket, deltas, torch.zeros_like(means))
        time.sleep(0.5)  # in which others would count it
        raise RuntimeError("it failed")

    setattr(Exchange, "average", fail)  # noqa: B010


def go_on(place: Place, settings: dict[str, Any], killed: int, num_returns: int) -> None:
    """Train until a team has come back so many times, and on for two meetings. While it is not there, fetch the dense
    model, between two meetings, and once when it is."""
    run = Run(place, settings)
    run.team.start()
    if (place.team, place.rank) == (1, place.size - 1):
        fail_once()
    returns = 0
    while returns < num_returns:
        run.meet()
        if killed not in run.team.present:
            run.step()
            (place.folder / "without").touch()
            while killed not in run.team.present:
                run.team.dense_state_dict()
        returns += killed in run.team.joined
    run.team.dense_state_dict()  # the team that has come back cannot know
    run.meet_until(run.team.version + 2)
    assert run.num_steps == run.team.num_steps, "a local step was lost"
    run.save_dense()


def die(place: Place, settings: dict[str, Any], phase: str) -> None:
    """Meet once, and kill the last rank of the team in the next meeting."""
    run = Run(place, settings)
    run.team.start()
    run.meet()
    owner, method = PHASES[phase]

    def kill(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if place.rank == place.size - 1:
        setattr(owner, method, kill)
    run.meet()
    raise AssertionError("a team of which a rank was killed has met")


def come_back(place: Place, settings: dict[str, Any]) -> None:
    """Its state is left on one rank only, which is as good as none."""
    run = Run(place, settings)
    if place.rank == 0 and place.size > 1:
        run.team.load_state_dict({**run.team.state_dict(), "version": 100, "last": "elsewhere"})
    run.team.start()
    version = run.team.version
    assert run.team.num_steps % 2 == 1, "the others are between two meetings"
    assert run.step(), "it meets with them"
    run.meet_until(version + 2)
    run.save_dense()


def killed_in(run: Teams, phases: list[str], killed: int, num_teams: int, size: int, coverage: float) -> None:
    settings = block(num_teams, coverage)
    others = set(range(num_teams)) - {killed}
    started = [run.start(go_on, number, size, settings, killed, len(phases)) for number in others]
    for phase in phases:
        dying = run.start(die, killed, size, settings, phase)
        dying.processes[-1].join(PATIENCE)
        assert dying.processes[-1].exitcode == -signal.SIGKILL, (phase, dying.error())
        dying.kill()  # as a launcher does with the other ranks
    while not (run.folder / "without").exists():
        assert all(process.is_alive() for team in started for process in team.processes)
        time.sleep(0.1)
    started.append(run.start(come_back, killed, size, settings))
    run.finish(*started)
    assert_equal(run.folder, range(num_teams))


def test_a_team_is_killed_in_an_exchange_and_comes_back(tmp_path: Path) -> None:
    """Team 0 has the store, in which meetings are decided."""
    with teams(tmp_path) as run:
        killed_in(run, ["in the exchange"], killed=0, num_teams=3, size=2, coverage=2 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 2])
def test_a_team_is_killed_in_each_phase_of_a_meeting(killed: int, tmp_path: Path) -> None:
    with teams(tmp_path) as run:
        killed_in(run, list(PHASES), killed=killed, num_teams=4, size=1, coverage=0.5)


def stop_or_go_on(place: Place, settings: dict[str, Any], stopped: int, phase: str) -> None:
    """A team is stopped in its second meeting; the others write when they have met without it."""
    owner, method = PHASES[phase]
    original, file = getattr(owner, method), place.folder / "stopped"
    run = Run(place, settings)
    run.team.start()
    run.meet()

    def stop(*arguments: Any) -> Any:
        setattr(owner, method, original)
        if place.team == stopped:
            file.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            while not file.exists() or psutil.Process(int(file.read_text() or 1)).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
        return original(*arguments)

    setattr(owner, method, stop)
    while stopped not in run.team.joined:
        run.meet()
        if stopped not in run.team.present:
            (place.folder / "without").touch()
    assert place.team == stopped or run.num_steps == run.team.num_steps, "a local step was lost"
    run.meet_until(run.team.version + 2)
    run.save_dense()


@pytest.mark.slow
@pytest.mark.parametrize(("stopped", "phase"), [(2, "in the exchange"), (0, "before it decides")])
def test_a_team_that_is_stopped_is_missed_and_comes_back(stopped: int, phase: str, tmp_path: Path) -> None:
    """Team 0 has the store, which does not answer while it is stopped."""
    settings = block(3, 2 / 3)
    settings["local_steps"]["exchange_timeout"] = 5.0
    with teams(tmp_path) as run:
        for number in range(3):
            run.start(stop_or_go_on, number, 1, settings, stopped, phase)
        while not (tmp_path / "without").exists():
            assert all(process.is_alive() for team in run.started for process in team.processes)
            time.sleep(0.1)
        os.kill(run.started[stopped].processes[0].pid, signal.SIGCONT)
        run.finish()
    assert_equal(tmp_path, range(3))


# ---- refused --------------------------------------------------------------------------------------------------------


def meet_twice(place: Place, settings: dict[str, Any]) -> None:
    run = Run(place, settings)
    run.team.start()
    run.meet_until(2)
    run.save_dense()


def lose_values(place: Place, settings: dict[str, Any]) -> None:
    """Team 1 gets weights that are not finite after the second meeting."""
    run = Run(place, settings)
    run.team.start()
    run.meet_until(2)
    if place.team == 1:
        run.spoil()
    run.meet_until(4)
    assert run.team.present == (0,)
    assert all(value.isfinite().all() for value in run.team.dense_state_dict().values())


@pytest.mark.slow
def test_values_that_are_not_finite_end_their_team_alone(tmp_path: Path) -> None:
    with teams(tmp_path) as run:
        first, second = (run.start(lose_values, number, 1, block(2)) for number in range(2))
        assert second.wait() == [1]
        assert "team 1: weights are not finite at step 6" in second.error()
        run.finish(first)


def test_a_team_that_differs_is_refused_by_name_and_the_others_go_on(tmp_path: Path) -> None:
    settings = block(3)
    with teams(tmp_path) as run:
        for number in (0, 1):
            run.start(meet_twice, number, 1, settings)
        refused = run.start(meet_twice, 2, 2, settings)
        assert refused.wait() == [1, 1]
        assert "team 2 has ranks 2, team 0 has 1" in refused.error()
        run.started.remove(refused)
        run.start(meet_twice, 2, 1, settings)
        run.finish()
    assert_equal(tmp_path, range(3))


# ---- leaving --------------------------------------------------------------------------------------------------------


def leave_early(place: Place) -> None:
    run = Run(place, block(2))
    run.team.start()
    run.meet_until(2 if place.team == 1 else 4)
    run.team.leave()
    with pytest.raises(RuntimeError, match="has left the run"):
        run.team.dense_state_dict()
    assert run.team.version == (2 if place.team == 1 else 4)


@pytest.mark.slow
def test_a_team_that_leaves_is_not_waited_for(tmp_path: Path) -> None:
    with teams(tmp_path) as run:
        for number in range(2):
            run.start(leave_early, number)
        run.finish()


# ---- the lighthouse -------------------------------------------------------------------------------------------------


def lose_the_lighthouse(place: Place, process: int) -> None:
    run = Run(place, block(2))
    run.team.start()
    run.meet_until(2)
    if place.team == 0:
        os.kill(process, signal.SIGKILL)
    run.meet_until(4)
    assert run.team.present == (0, 1)
    run.save_dense()


@pytest.mark.slow
def test_a_lighthouse_that_is_started_again(tmp_path: Path) -> None:
    port = free_port()
    with teams(tmp_path, f"http://127.0.0.1:{port}") as run:
        light = forkserver_context().Process(target=serve_lighthouse, args=(port,), daemon=True)
        light.start()
        for number in range(2):
            run.start(lose_the_lighthouse, number, 1, light.pid)
        light.join(PATIENCE)
        assert light.exitcode == -signal.SIGKILL
        again = forkserver_context().Process(target=serve_lighthouse, args=(port,), daemon=True)
        again.start()
        run.finish()
        again.kill()
    assert_equal(tmp_path, range(2))


# ---- states ---------------------------------------------------------------------------------------------------------


def restore(place: Place) -> None:
    """All teams are gone, and come back with states of different versions, one of them without."""
    settings = block(3)
    run = Run(place, settings)
    run.team.start()
    for version in (1, 2, 3):
        run.meet_until(version)
        if version == min(place.team + 2, 3):  # teams 0, 1, 2: versions 2, 3, 3
            saved = run.team.state_dict()
    run.step()
    run.team.leave()
    newest = run.team.state_dict()
    os.environ["TORCHFT_LIGHTHOUSE"] = os.environ["SECOND"]
    run = Run(place, settings)
    if place.team != 2:
        run.team.load_state_dict(saved)
    run.team.start()
    assert run.team.version == 3
    assert run.num_steps == 0
    assert run.team.num_steps == 6
    restored = run.team.state_dict()
    assert torch.equal(restored["anchors"], newest["anchors"])
    assert torch.equal(restored["momentum"], newest["momentum"])
    dense, own = run.team.dense_state_dict(), run.model.module.state_dict()
    if place.team != 1:  # which is current, and keeps its weights
        assert all(torch.equal(own[name], value) for name, value in dense.items()), "trains on from its own weights"
    run.meet()
    assert run.team.version == 4
    assert run.team.present == (0, 1, 2)
    if place.team == 2:
        run.spoil()
        with pytest.raises(RuntimeError, match="team 2: weights are not finite at step 10"):
            run.meet()
    if place.team == 1:
        run.model.load_state_dict({name: value * 0.9 for name, value in run.model.state_dict().items()})
        with pytest.raises(RuntimeError, match="team 1: weights were changed"):
            run.meet()


def test_all_are_gone_and_come_back_with_different_versions(tmp_path: Path) -> None:
    with teams(tmp_path, heartbeats=NEVER_MISSED) as run, teams(tmp_path, heartbeats=NEVER_MISSED) as second:
        for number in range(3):
            run.start(restore, number, 1, SECOND=second.address)
        run.finish()


def lose_a_unit(place: Place) -> None:
    """Both holders of some units come back with older states, while the third team trains on: it meets them, and the
    newest state that is left of those units counts."""
    settings = block(3, 2 / 3)
    run = Run(place, settings)
    run.team.start()
    for version in (1, 2, 3):
        run.meet_until(version)
        if version == place.team:
            saved = run.team.state_dict()
    if place.team > 0:
        run.team.leave()
        run = Run(place, settings)
        run.team.load_state_dict(saved)
        run.team.start()
    run.meet_until(5)
    run.save_dense()


def test_all_holders_of_a_unit_come_back_with_older_versions(tmp_path: Path) -> None:
    with teams(tmp_path) as run:
        for number in range(3):
            run.start(lose_a_unit, number, 1)
        run.finish()
    assert_equal(tmp_path, range(3))
