"""`sdp arm`: every Python of this environment honors the block, whether a program imports the package or not.

A line in a `.pth` file of site-packages imports the package when an interpreter starts, which costs milliseconds and
imports nothing heavy. A file that is left behind when the package is gone does nothing.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from sdp_deepspeed.atomic_files import write_text
from sdp_deepspeed.command_parser import Parser

FILE = "zz_sdp_deepspeed.pth"  # after those of editable installations, by which the package is found
SWITCH = "SDP_DEEPSPEED_ARM"  # 0 leaves an interpreter alone; no setting of a run
_BODY = "try:\\n import sdp_deepspeed\\nexcept ImportError:\\n pass"
LINE = f'import os; os.environ.get("{SWITCH}") == "0" or exec("{_BODY}")\n'


def configure(parser: Parser) -> None:
    """Arguments of `sdp arm`."""
    parser.description = (
        "Let every Python of this environment honor the block subnetwork_data_parallel, also where a program forgets\n"
        f"`import sdp_deepspeed`. Writes {FILE} into site-packages; {SWITCH}=0 switches it off."
    )
    parser.add_argument("--off", action="store_true", help="remove the file again")
    parser.add_argument("--site-packages", type=Path, help="of another environment than this one's", default=None)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    folder = options.site_packages or Path(sysconfig.get_path("purelib"))
    if not folder.is_dir():
        raise ValueError(f"--site-packages: there is no folder {folder}")
    print(disarm(folder) if options.off else arm(folder))
    return 0


def arm(folder: Path) -> str:
    """Write the file, and say what that means."""
    write_text(folder / FILE, LINE)
    return f"{folder / FILE}: every Python of this environment honors the block now; `sdp arm --off` ends that"


def disarm(folder: Path) -> str:
    """Remove the file, and say whether it was there."""
    path = folder / FILE
    if not path.exists():
        return f"{path} is not there: programs must `import sdp_deepspeed` themselves"
    path.unlink()
    return f"{path} is removed: programs must `import sdp_deepspeed` themselves"
