"""What `join` refuses, before it changes the model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn

import sdp_deepspeed
from sdp_deepspeed.config import KEY
from sdp_deepspeed.init import DeferredWeights
from sdp_deepspeed.teams.attendance import Member
from tests.helpers.models import batches, llama, loss_of

STEPS = {"teams": 2, "every": 2}
BLOCK = {"coverage": 0.5, "local_steps": STEPS}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDP_TEAM", "1")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:1")


def check(block: Any, text: str, model: nn.Module | None = None) -> None:
    model = llama() if model is None else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(text)):
        sdp_deepspeed.join(model, block)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_block() -> None:
    check({KEY: BLOCK}, "expected the contents of")
    check({"coverage": 0.5}, 'local_steps such as {"teams": 4, "every": 50}')
    check({"schedule": [{"coverage": 0.5, "until_step": 1}, {"coverage": 1.0}]}, f"{KEY}.schedule: ")
    check({**BLOCK, "enabled": False}, f"{KEY}.enabled: ")
    check({**BLOCK, "coverage": 0.3}, f"{KEY}.coverage: 0.3 of 2 teams is 0.6 holders per unit")


@pytest.mark.parametrize("number", ["", "2", "-1", "one"])
def test_the_number_of_the_team(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDP_TEAM", number)
    check(BLOCK, f"SDP_TEAM: got {number!r}, expected a number from 0 to 1")


@pytest.mark.parametrize("address", ["", "host:29510", "http://host", "http://:29510", "http://host:port"])
def test_the_lighthouse(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
    check(BLOCK, f"TORCHFT_LIGHTHOUSE: got {address!r}")


def test_the_dtype_of_communication() -> None:
    with pytest.raises(ValueError, match=r"communication_dtype: got torch.int8, expected torch.float32 or"):
        sdp_deepspeed.join(llama(), BLOCK, communication_dtype=torch.int8)


def test_the_calls_before_start() -> None:
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    model = llama()
    team = sdp_deepspeed.join(model, BLOCK)
    assert team.number == 1
    assert team.plan.num_subnetworks == 2
    assert sum(parameter.numel() for parameter in model.parameters()) < sum(p.numel() for p in llama().parameters())
    for call in (team.step, team.dense_state_dict):
        with pytest.raises(RuntimeError, match=r"call team.start\(\) first"):
            call()
    assert list(team.shard(list("abcde"))) == ["b", "d"]
    assert team.shard(Dataset.from_dict({"x": [*range(5)]}))["x"][:] == [3, 4], "as datasets divide"


class Layer(nn.Module):
    """Adds what `body` computes, or its square, which is scaled otherwise."""

    def __init__(self, is_squared: bool = False) -> None:
        super().__init__()
        self.body, self.is_squared = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), is_squared

    def forward(self, x: torch.Tensor) -> Any:
        added = self.body(x)
        return x + (added * added if self.is_squared else added)


def test_layers_without_units_are_named(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    model = nn.Sequential(Layer(), Layer(), Layer(True))
    sdp_deepspeed.trace(model, torch.zeros(2, 4))
    sdp_deepspeed.join(model, BLOCK)
    assert "layers or types are replicated, such as '" in caplog.text


def test_a_model_built_under_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both teams have pieces of one model, whose output projections start multiplied by C."""
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    weights = DeferredWeights(deferred_llama())
    for number in ("0", "1"):
        monkeypatch.setenv("SDP_TEAM", number)
        model = deferred_llama()
        random_state = torch.get_rng_state()
        sdp_deepspeed.join(model, BLOCK)
        assert torch.equal(torch.get_rng_state(), random_state)
        for name, parameter in model.named_parameters():
            factor = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            assert torch.equal(parameter, factor * weights.value(name, 3)), name
        assert loss_of(model, next(batches(1, 1))[0][0]).isfinite()


def deferred_llama() -> nn.Module:
    torch.manual_seed(3)
    with sdp_deepspeed.Init():
        return llama()


def test_the_state_of_another_run(caplog: pytest.LogCaptureFixture) -> None:
    """It is refused where it would be wrong."""
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    team = sdp_deepspeed.join(llama(), BLOCK)
    state = {**team.state_dict(), "version": 3, "last": "meeting", "num_steps": 31, "steps_since": 1}
    state["anchors"] += 1
    agreed = {**state["agreed"], "version of sdp_deepspeed": "0.0.9", "local_steps": "every 10"}
    for key, wrong in (("team", {"team": 0}), ("plan", {"agreed": {**agreed, "plan": "other"}})):
        with pytest.raises(ValueError, match=f"the state has {key}"):
            team.load_state_dict({**state, **wrong})
    team.load_state_dict({**state, "agreed": agreed, "momentum": torch.ones(3)})
    assert "the state has version of sdp_deepspeed 0.0.9, here it is " in caplog.text
    assert (team.version, team.num_steps) == (3, 31)
    loaded = team.state_dict()
    assert torch.equal(loaded["anchors"], state["anchors"])
    assert len(loaded["momentum"]) == 0, "the outer optimizer has none now"


@pytest.mark.parametrize("what", ["weights", "momentum"])
def test_values_that_are_not_finite_are_not_shown_to_others(what: str) -> None:
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    model = llama()
    team = sdp_deepspeed.join(model, {**BLOCK, "local_steps": {**STEPS, "wait_timeout": 1.0, "outer_momentum": 0.9}})
    if what == "weights":
        with torch.no_grad():
            next(model.parameters())[0] = torch.inf
    else:
        state = team.state_dict()
        team.load_state_dict({**state, "version": 0, "momentum": state["momentum"] + torch.inf})
    with pytest.raises(RuntimeError, match="team 1: its first weights are not finite"):
        team.start()


class Alone:
    """A meeting point to which nobody else comes."""

    identity, group_name, store = "me", "", ""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def gather(self, member: Member, *_: Any) -> list[Member]:
        return [member]

    def leave(self) -> None:
        pass


def test_teams_differ_if_their_frozen_weights_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    monkeypatch.setattr("sdp_deepspeed.teams.team.MeetingPoint", Alone)
    found = []
    for frozen, trained in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0)):
        model: Any = llama()
        with torch.no_grad():
            model.lm_head.weight.fill_(trained)
            model.model.embed_tokens.weight[0, 0] = frozen
        model.model.embed_tokens.requires_grad_(False)
        team = sdp_deepspeed.join(model, {**BLOCK, "local_steps": {**STEPS, "wait_timeout": 0.05}})
        with pytest.raises(RuntimeError, match="gave up"):
            team.start()
        found.append(team.state_dict()["agreed"])
    assert found[0] == found[1]
    assert {name for name in found[0] if found[0][name] != found[2][name]} == {"frozen weights"}


def test_a_lone_team_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 to 3.13")
    monkeypatch.setattr("sdp_deepspeed.teams.team.MeetingPoint", Alone)
    for name, seconds in (("REMIND", 0.0), ("RETRY", 0.01)):
        monkeypatch.setattr(f"sdp_deepspeed.teams.participant.{name}", seconds)
    team = sdp_deepspeed.join(llama(), {**BLOCK, "local_steps": {**STEPS, "wait_timeout": 0.05}})
    with pytest.raises(RuntimeError, match=r"no holder of model\.layers\.1.*; waiting for one of teams 0; gave up"):
        team.start()
    assert "waiting for one of teams 0, since 0 s" in caplog.text
