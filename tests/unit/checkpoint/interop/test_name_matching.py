"""Names of one model found in another's."""

from __future__ import annotations

from sdp_deepspeed.checkpoint.interop.name_matching import NameMap


def test_names() -> None:
    names = NameMap(frozenset({"model.a", "b", "c"}), {"tied": "b"}, "model", (r"mask$",))
    match = names.match({"a", "tied", "other", "x.mask"})
    assert dict(match.found) == {"model.a": "a", "b": "tied"}
    assert (match.missing, match.unknown, dict(match.tied)) == (["c"], ["other"], {})
    match = names.match({"model.a", "a", "b", "tied", "model.c"})
    assert dict(match.found) == {"model.a": "model.a", "b": "b", "c": "model.c"}
    assert (match.missing, match.unknown, dict(match.tied)) == ([], ["a"], {"b": ["tied"]})
