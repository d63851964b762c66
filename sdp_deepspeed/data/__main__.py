"""Prepare the data of a config beforehand: `python -m sdp_deepspeed.data <data.json>`.

For corpora that take longer to tokenize than one wants to hold accelerators for, and for clusters
without a shared file system (once on each node).
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.packing import PreparedData
from sdp_deepspeed.data.prepare import prepare


def main(arguments: list[str]) -> int:
    """Exit code 0 when the data is ready, 2 for a mistake of the user, told in one line."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        values = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{arguments[0]}: expected a JSON object of data settings, got {type(values).__name__}")
        folder = prepare(DataConfig.from_dict(values))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {PreparedData.load(folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
