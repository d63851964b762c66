"""Numbers of bytes, read and written."""

from __future__ import annotations

import argparse

import pytest

from sdp_deepspeed.sizes import byte_count, bytes_text, mib_text


def test_what_is_read() -> None:
    texts = {"5GB": 5 * 10**9, "200MB": 2 * 10**8, "1.5k": 1500, "7": 7, "2GiB": 2 * 2**30, "3ki": 3072}
    assert {text: byte_count(text) for text in texts} == texts


@pytest.mark.parametrize("text", ["", "0", "0GB", "-1", "5XB", "5iB", "GB", "much"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a size such as 5GB or 200MB"):
        byte_count(text)


def test_what_is_written() -> None:
    texts = {0: "0 bytes", 999: "999 bytes", 1500: "1.50 kB", 5 * 10**9: "5.00 GB", 3 * 10**15: "3000.00 TB"}
    assert {count: bytes_text(count) for count in texts} == texts
    assert mib_text(2**18) == "0.25 MiB"
