"""What a GPU can do at best: dense products of bf16 with sums in fp32, by the makers' data sheets.

NVIDIA's sheets print the rate with sparsity for most of these, which is twice as much.
"""

from __future__ import annotations

import re

# By the name that the driver gives, the first that is found; operations per second.
PEAKS = (
    (r"\bB200\b", 2250e12),
    (r"\bH200 NVL\b", 835.5e12),
    (r"\bH200\b", 989.4e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835.5e12),
    (r"\bH100\b", 989.4e12),  # SXM: "NVIDIA H100 80GB HBM3"
    (r"\bA100\b", 312e12),
    (r"\bA30\b", 165e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA10\b", 125e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
)


def peak_flops(device_name: str) -> float | None:
    """Per second; None for a device that is not in the table."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, device_name)), None)
