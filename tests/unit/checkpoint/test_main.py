"""The command for checkpoints: what it reads on its command line."""

from __future__ import annotations

from sdp_deepspeed.checkpoint.__main__ import size


def test_sizes() -> None:
    texts = {"5GB": 5 * 10**9, "200MB": 2 * 10**8, "1.5k": 1500, "7": 7, "2GiB": 2 * 10**9}
    assert {text: size(text) for text in texts} == texts
