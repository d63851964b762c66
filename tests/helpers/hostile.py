"""Strategies for JSON that somebody got wrong: any value at all, and documents with one thing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

_EDGES = [
    0,
    1,
    -1,
    2**31,
    10**12,
    -(10**400),
    0.0,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "auto",
    "1",
    "\0",
    "é\u2028",
]
_LEAVES = st.sampled_from([None, True, False, *_EDGES]) | st.integers() | st.floats() | st.text(max_size=8)
DEEPEST = 20
Path = tuple[Any, ...]  # keys and indices from the root


def json_values() -> st.SearchStrategy[Any]:
    """What a JSON parser can return, Python's NaN and infinities included; sometimes nested deeply."""
    values = st.recursive(
        _LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=8,
    )
    return values | st.integers(1, 100).map(nested)


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    result: list[Any] = []
    for _ in range(depth):
        result = [result]
    return result


def paths(document: Any) -> Iterator[Path]:
    """Where the values of a document are, the root excepted, and what lies very deep."""
    left: list[tuple[Path, Any]] = [((), document)]
    while left:
        path, holder = left.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, value in items:
            yield (*path, key)
            if len(path) < DEEPEST:
                left.append(((*path, key), value))


@st.composite
def mutated(draw: st.DrawFn, documents: st.SearchStrategy[Any], *, most: int = 3) -> Any:
    """A document in which up to `most` values are dropped, replaced, renamed or repeated."""
    document = copy.deepcopy(draw(documents))
    for _ in range(draw(st.integers(1, most))):
        places = list(paths(document))
        if not places:
            break
        *way, last = draw(st.sampled_from(places))
        holder = document
        for key in way:
            holder = holder[key]
        kind = draw(st.sampled_from(["replace", "drop", "rename", "repeat", "wrap"]))
        value = holder[last]
        if kind == "replace":
            holder[last] = draw(json_values())
        elif kind == "wrap":
            holder[last] = draw(st.sampled_from([[value], {"value": value}, str(value)]))
        elif kind == "drop":
            del holder[last]
        elif isinstance(holder, list):
            holder.insert(last, value)
        else:
            holder[draw(st.text(max_size=6)) if kind == "rename" else f"{last} "] = value
    return document


def refusal_of(work: Callable[[], Any]) -> str | None:
    """The message of the ValueError that `work` raises, None if it raises none; other errors are not expected."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return None
