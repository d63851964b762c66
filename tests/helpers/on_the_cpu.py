"""Runs a user's script for Accelerate on a CPU: `on_the_cpu.py SCRIPT ARGUMENT...`.

Together with DeepSpeed Accelerate looks for GPUs only, and without one takes each process for the only one. What it is
told first it keeps.
"""

from __future__ import annotations

import runpy
import sys

from accelerate import PartialState

if __name__ == "__main__":
    PartialState(cpu=True).wait_for_everyone()  # a script that ends at once would take the others' store with it
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
