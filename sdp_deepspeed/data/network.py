"""Text over a network: what is asked for again, and what is said when it cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Of the statuses from 400 to 499, which say that something is not there or not allowed, those that pass.
_PASSING = (408, 425, 429)


@contextmanager
def reaching(name: str) -> Iterator[None]:
    """Errors of the network in one line that says what was tried and what to do.

    Raises:
        ValueError: the hub has answered that there is no such thing, or not for this user.
        ConnectionError: another try may succeed.
    """
    try:
        yield
    except Exception as error:
        chain: list[BaseException] = [error]
        while (below := chain[-1].__cause__ or chain[-1].__context__) is not None and below not in chain:
            chain.append(below)  # of an error that a library raises again from its own cause, the chain is a circle
        of_network = [link for link in chain if _is_of_network(link)]
        if isinstance(error, ValueError) or not of_network:
            raise
        from huggingface_hub import constants

        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        tried = f"the data set {name} cannot be read from {constants.ENDPOINT}: {said}"
        if _is_refusal(of_network[0]):
            raise ValueError(
                f"{tried}. Check path, subset and revision; what is private or gated needs a token (`hf auth login` or "
                "HF_TOKEN)"
            ) from error
        raise ConnectionError(
            f"{tried}. Without a network give a local mirror of its files "
            '("source": "files", "path": "<folder>"), or run `sdp data <data.json>` with these '
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


def _is_refusal(error: BaseException) -> bool:
    """Of the hub, which has answered; one without an answer may have come from any place on the way."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None:
        return type(error).__name__ == "DatasetNotFoundError"
    return 400 <= status < 500 and status not in _PASSING


def reading_on(file: Any) -> Any:
    """A file of `fsspec`, whose `read` asks for what is missing: an answer that was cut would pass for the file's end.

    ConnectionError where nothing more comes.
    """
    read = file.read

    def whole(length: int | None = -1) -> bytes:
        stop = file.size if length is None or length < 0 else min(file.size, file.tell() + length)
        content: bytes = read(length)
        while file.tell() < stop:
            more = read(stop - file.tell())
            if not more:
                raise ConnectionError(f"an answer ended {stop - file.tell()} bytes too early")
            content += more
        return content

    file.read = whole
    return file
