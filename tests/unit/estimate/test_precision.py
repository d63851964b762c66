"""Bytes per element."""

from __future__ import annotations

from sdp_deepspeed.estimate.precision import Precision


def test_dtypes() -> None:
    assert Precision.of("fp32") == Precision(weights=4, gradients=4, wire=4, num_moments=2)
    assert Precision.of("bf16") == Precision.of("fp16") == Precision(2, 2, 2)
    assert Precision.of("bf16", accumulate_in_fp32=True) == Precision(2, 4, 2)
    assert Precision.of("bf16", wire=4, moments=0) == Precision(2, 2, 4, 0)


def test_a_master_is_kept_beside_weights_of_two_bytes_or_in_host_memory() -> None:
    assert Precision.of("fp32").optimizer() == 8
    assert Precision.of("fp32").optimizer(offload=True) == Precision.of("bf16").optimizer() == 12
    assert Precision.of("bf16", moments=0).optimizer() == 4
