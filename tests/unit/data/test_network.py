"""Parquet from a hub on this machine: what is asked for again, and what is said at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdp_deepspeed.data import row_groups
from sdp_deepspeed.data.hub import HubDataset
from sdp_deepspeed.data.network import reaching
from sdp_deepspeed.data.parts import Part
from sdp_deepspeed.data.row_groups import RowGroups
from sdp_deepspeed.data.tokenize_part import Task
from sdp_deepspeed.data.workers import InThisProcess
from tests.helpers.fake_hub import REPOSITORY, FakeHub, fake_hub
from tests.helpers.fineweb import write_shard
from tests.helpers.streams import SmallStream, small_stream

TEXTS = [f"{number * 7919} page " * 40 for number in range(300)]


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> SmallStream:
    return small_stream(tmp_path_factory.mktemp("stream"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """With one file; the hub's own library gives up at once, as it does after half a minute."""
    import datasets.config
    import huggingface_hub.constants
    from huggingface_hub import hf_file_system

    content = write_shard(tmp_path / "0.parquet", TEXTS, rows=100).read_bytes()
    row_groups._opened.cache_clear()
    with fake_hub({"0.parquet": content}) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.endpoint)
        once = partial(hf_file_system.http_backoff, max_retries=0)
        monkeypatch.setattr(hf_file_system, "http_backoff", once)
        monkeypatch.setattr("sdp_deepspeed.data.workers._SECONDS_BEFORE_TRIES", (0.0, 0.0, 0.0))
        yield server


@pytest.fixture
def read(stream: SmallStream, tmp_path: Path) -> Callable[[Part], int]:
    """Documents of a part, as whoever tokenizes reads it."""

    def documents(part: Part) -> int:
        queue = InThisProcess(stream.setup)
        queue.submit(Task(0, part, tmp_path))
        return sum(count.documents for count in queue.next_result().counts.values())

    return documents


def _dataset(name: str = REPOSITORY, **changes: Any) -> HubDataset:
    settings = {"subset": None, "split": "train", "revision": None, "text_column": "text", "streaming": True}
    return HubDataset(name=name, **(settings | changes))


def _reads_of(hub: FakeHub, faults: list[str]) -> None:
    hub.reads.clear()
    hub.faults[:] = faults


@pytest.mark.parametrize(
    "faults", [["short"] * 7, ["cut"], ["503", "cut", "429"]], ids=lambda faults: f"{len(faults)}-{faults[0]}"
)
def test_a_bad_network_is_asked_again(hub: FakeHub, read: Callable[[Part], int], faults: list[str]) -> None:
    """A connection that is lost, an answer that is cut and passes for whole, a server that is busy."""
    (part,) = _dataset().parts()
    assert isinstance(part, RowGroups)
    row_groups._opened.cache_clear()
    _reads_of(hub, faults)
    assert list(part.documents()) == TEXTS if faults[0] == "short" else read(part) == len(TEXTS)
    assert hub.reads[: len(faults)] == faults
    assert hub.reads[-1] == "whole"


def test_the_footer_of_a_file_is_read_whole_too(hub: FakeHub) -> None:
    _reads_of(hub, ["short"] * 5)
    (part,) = _dataset().parts()
    assert hub.reads[:5] == ["short"] * 5
    assert list(part.documents()) == TEXTS


def test_an_answer_of_nothing_is_no_end_of_the_file(hub: FakeHub) -> None:
    (part,) = _dataset().parts()
    row_groups._opened.cache_clear()
    _reads_of(hub, ["empty"] * 4)
    with pytest.raises(ConnectionError, match=r"an answer ended \d+ bytes too early.*local mirror"):
        list(part.documents())


@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_a_refusal_is_told_at_once(hub: FakeHub, read: Callable[[Part], int], status: str) -> None:
    (part,) = _dataset().parts()
    row_groups._opened.cache_clear()
    _reads_of(hub, [status] * 4)
    with pytest.raises(ValueError, match=rf"0\.parquet cannot be read from {hub.endpoint}: .*Check path, .*HF_TOKEN"):
        read(part)
    assert hub.reads == [status]


def test_a_wrong_name_is_a_mistake_of_the_config(hub: FakeHub) -> None:
    with pytest.raises(ValueError, match=rf"^the data set owner/other cannot be read from {hub.endpoint}: .*Check"):
        _dataset("owner/other").parts()


class HTTPError(Exception):
    """Of a library, by its name, with the server's answer."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} for url")
        self.response = SimpleNamespace(status_code=status)


def test_what_failed_last_decides() -> None:
    """A library looks for a file that need not be there, and asks for something else, when the network goes."""
    lost, absent = ConnectionError("no route"), HTTPError(404)
    lost.__context__ = HTTPError(404)
    with pytest.raises(ConnectionError, match="no route"), reaching("owner/name"):
        raise lost
    absent.__context__ = ConnectionError("no route")
    with pytest.raises(ValueError, match="404 for url"), reaching("owner/name"):
        raise absent


def test_a_server_that_fails_at_start_is_told_once(hub: FakeHub) -> None:
    _reads_of(hub, ["503"] * 2)
    with pytest.raises(ConnectionError) as error:
        _dataset().parts()
    assert str(error.value).count("Without a network") == 1
