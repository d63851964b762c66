"""Options and the shared spawn fixtures."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("busy", deadline=None)  # a machine under load is no failure
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-grid", action="store_true", help="run every cell of the oracle grid, not a pairwise sample"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(sizes, maker): outcomes of the checks that maker(size, config) lists")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.ranks(size, maker)` on a test with the argument `outcome`: a test per check, one spawn per size."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    sizes, maker = marker.args
    checks = [
        (size, maker, name)
        for size in (sizes if isinstance(sizes, tuple) else (sizes,))
        for name, _ in maker(size, metafunc.config)
    ]
    metafunc.parametrize("outcome", checks, ids=[f"{size}-{name}" for size, _, name in checks], indirect=True)


_OUTCOMES: dict[tuple[int, object], dict[str, str | None]] = {}


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> str | None:
    """Why a spawned check failed, or None."""
    from tests.helpers.ranks import run_ranks

    size, maker, name = request.param
    if (size, maker) not in _OUTCOMES:
        checks = list(maker(size, request.config))
        _OUTCOMES[size, maker] = run_ranks(size, checks, timeout=60 + 20 * len(checks))
    return _OUTCOMES[size, maker][name]
