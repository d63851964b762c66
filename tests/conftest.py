"""What all tests share: a marker for each tier, options, and the outcomes of checks on forked ranks."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.helpers.gpus import ON_THE_CPU, why_no_gpu
from tests.helpers.programs import START_UP
from tests.helpers.repository import TESTS

TIERS = {
    "unit": "one process, seconds for all of it",
    "ranks": "checks on forked ranks",
    "launcher": "whole programs",
}

# No deadline: a machine under load is no failure.
settings.register_profile("thorough", deadline=None, max_examples=50)
settings.register_profile("quick", deadline=None, max_examples=25)
settings.load_profile("quick")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # on small tensors threads only cost; read when torch is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="tests marked slow too, every case of the oracle grid, and thorough properties",
    )
    parser.addoption("--gpu", action="store_true", help="tests marked gpu run on a GPU; all others stay on the CPU")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected
    # Before anybody asks torch for GPUs, and for the programs that tests start.
    os.environ |= {"DS_ACCELERATOR": "cpu"} if config.getoption("--gpu") else ON_THE_CPU
    config.addinivalue_line(
        "markers", "gpu: on a GPU with --gpu; else its ranks are on the CPU, or it is skipped if it has none"
    )
    config.addinivalue_line("markers", "slow: sleeps, kills, waits for a time limit, or repeats others; with --full")
    if config.getoption("--full"):
        settings.load_profile("thorough")
    for name, what in TIERS.items():
        config.addinivalue_line("markers", f"{name}: {what} (set by folder)")
    config.addinivalue_line(
        "markers",
        "world(*sizes, slow=(), gpu_backend=...): a test with the argument `rank` runs on so many forked ranks",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    tier = item.path.relative_to(TESTS).parts[0]
    if tier in TIERS:
        item.add_marker(tier)
    if tier == "launcher":  # each rerun is in the summary: it may have been a deadlock
        item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=[f"{START_UP}: time limit"]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full") and "slow" not in config.option.markexpr:
        for_gpus = config.getoption("--gpu") or "gpu" in config.option.markexpr
        slow = [i for i in items if i.get_closest_marker("slow") and not (for_gpus and i.get_closest_marker("gpu"))]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    if config.getoption("--gpu"):
        if (reason := why_no_gpu()) is not None:
            raise pytest.UsageError(f"--gpu: {reason}")
        return
    for item in items:
        if item.get_closest_marker("gpu") and not {"place", "rank"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: --gpu"))


def pytest_collection_finish() -> None:
    """What imports made stays until the end: the garbage collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each size of a world."""
    world = metafunc.definition.get_closest_marker("world")
    named = [str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")]
    if world is not None and "rank" in metafunc.fixturenames and not any("'rank'" in names for names in named):
        slow = world.kwargs.get("slow", ())
        sizes = [pytest.param(size, marks=[pytest.mark.slow] if size in slow else []) for size in world.args]
        metafunc.parametrize("rank", sizes)


@dataclass
class _Run:
    """Checks on ranks of one size, and the outcomes that are there."""

    outcomes: Iterator[tuple[str, str | None]]
    known: dict[str, str | None] = field(default_factory=dict)

    def outcome(self, name: str) -> str | None:
        while name not in self.known:
            done, why = next(self.outcomes)
            self.known[done] = why
        return self.known[name]


@dataclass(frozen=True)
class World:
    """Ranks that tests of a file share.

    Args:
        backend: of their default group on a GPU; None for ranks on the CPU.
    """

    file: Path
    size: int
    backend: str | None


_WORLDS: dict[World, _Run] = {}


def _world_of(item: Any) -> World | None:
    """Of a test with the argument `rank`."""
    arguments = item.callspec.params if hasattr(item, "callspec") else {}
    if "rank" not in arguments:
        return None
    mark = item.get_closest_marker("world")
    is_on_gpu = item.config.getoption("--gpu") and item.get_closest_marker("gpu")
    backend = mark.kwargs.get("gpu_backend", "staged") if mark else "staged"
    return World(item.path, arguments["rank"], backend if is_on_gpu else None)


def _check_of(item: Any) -> tuple[str, Callable[..., None]]:
    from tests.helpers.ranks import call_on_rank

    arguments = {name: value for name, value in item.callspec.params.items() if name != "rank"}
    return item.name, partial(call_on_rank, item.function, arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """All tests of a world run when the first of them is asked for; what was not selected does not."""
    from tests.helpers.ranks import CPU, GPU, each_outcome

    world = _world_of(pyfuncitem)
    if world is None:
        return None
    if world not in _WORLDS:
        checks = [_check_of(item) for item in pyfuncitem.session.items if _world_of(item) == world]
        place = CPU if world.backend is None else replace(GPU, backend=world.backend)
        _WORLDS[world] = _Run(each_outcome(world.size, checks, place=place))
    why = _WORLDS[world].outcome(pyfuncitem.name)
    if why is not None:
        pytest.fail(why, pytrace=False)
    return True


@pytest.fixture
def own_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    from sdp_deepspeed.architectures import registry

    monkeypatch.setattr(registry, "_DESCRIPTIONS", {})


@pytest.fixture
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other tests' models that are like this one."""
    from sdp_deepspeed.architectures import derivation

    monkeypatch.setattr(derivation, "_OF_MODELS_LIKE", OrderedDict())


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Any:
    """Where this test's ranks are."""
    from tests.helpers.ranks import CPU, GPU

    return GPU if request.config.getoption("--gpu") and request.node.get_closest_marker("gpu") else CPU


def pytest_sessionfinish(session: pytest.Session) -> None:
    for run in _WORLDS.values():
        run.outcomes.close()  # type: ignore[attr-defined]  # a run that was interrupted leaves no ranks behind
