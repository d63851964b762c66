"""What is said when text cannot be read over the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reaching(name: str) -> Iterator[None]:
    """ConnectionError in one line that says what was tried, and what to do without a network."""
    try:
        yield
    except Exception as error:
        chain: list[BaseException] = [error]
        while (below := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(below)
        if isinstance(error, ValueError) or not any(map(_is_of_network, chain)):
            raise
        from huggingface_hub import constants

        said = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(
            f"the data set {name} cannot be read from {constants.ENDPOINT}: {said}. Without a network give a local "
            'mirror of its files ("source": "files", "path": "<folder>"), or run `sdp data <data.json>` with these '
            "settings where there is one and copy its cache_dir here"
        ) from error


def _is_of_network(error: BaseException) -> bool:
    """Of Python, requests, httpx, aiohttp or `huggingface_hub`, which need not be the classes of one another."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(
        names
        & {
            *("ConnectionError", "TimeoutError", "HTTPError", "HfHubHTTPError", "TransportError", "ClientError"),
            *("OfflineModeIsEnabled", "LocalEntryNotFoundError", "DatasetNotFoundError"),
        }
    )
