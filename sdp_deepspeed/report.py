"""The old form of `sdp report`, for one version: `python -m sdp_deepspeed.report RUN...`."""

import sys

from sdp_deepspeed.command_parser import run_old_form
from sdp_deepspeed.training.report_table import configure

if __name__ == "__main__":
    sys.exit(run_old_form("report", configure))
