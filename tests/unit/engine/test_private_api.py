"""Every private name that we use of a host exists; one that disappeared is named."""

from __future__ import annotations

import pytest

from sdp_deepspeed.engine import private_api as hosts


def test_nothing_is_missing() -> None:
    assert hosts.missing_names() == []


def test_the_installed_versions_are_the_tested_ones() -> None:
    """CI runs with the pinned versions, so a new pin must be added to TESTED."""
    assert hosts.check_hosts() == []


@pytest.mark.parametrize(
    "name", [("deepspeed.runtime.engine", "DeepSpeedEngine._gone"), ("deepspeed.runtime.engine", "Gone.step")]
)
def test_what_disappeared_is_named(monkeypatch: pytest.MonkeyPatch, name: tuple[str, str]) -> None:
    monkeypatch.setattr(hosts, "PRIVATE_NAMES", (*hosts.PRIVATE_NAMES, name))
    assert hosts.missing_names() == [".".join(name)]
    with pytest.raises(RuntimeError, match=rf"lack {'.'.join(name)}.*tested are deepspeed .*here are deepspeed"):
        hosts.check_hosts()


def test_a_module_that_disappeared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "PRIVATE_NAMES", (("deepspeed.runtime.gone", "thing"),))
    assert hosts.missing_names() == ["deepspeed.runtime.gone.thing"]


def test_another_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "version", lambda host: "99.0+local")
    assert [text.split(" was not tested")[0] for text in hosts.check_hosts()] == [
        f"{host} 99.0+local" for host in hosts.TESTED if host != "transformers"
    ]
