"""The old name of `training/report_table.py`, for one version: `python -m sdp_deepspeed.report RUN...`."""

import sys

from sdp_deepspeed.training.report_table import main

if __name__ == "__main__":
    sys.exit(main())
