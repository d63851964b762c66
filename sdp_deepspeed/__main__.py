"""The command line: `sdp VERB ...`, or `python -m sdp_deepspeed VERB ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from sdp_deepspeed.command_parser import Parser, run_command
from sdp_deepspeed.version import __version__

# Verb: the module that has its `configure`, imported when the verb is asked for; what it is for.
VERBS: dict[str, tuple[str, str]] = {
    "estimate": ("sdp_deepspeed.estimate.command", "memory and traffic, before anything runs"),
    "checkpoint": ("sdp_deepspeed.checkpoint.command", "inspect, verify, export and convert checkpoints"),
}
_DESCRIPTION = "Subnetwork data parallelism for DeepSpeed: what there is to do beside a training run."
_EXAMPLES = """\
examples:
  sdp estimate --ranks 8 configs/recipes/llama_134m.yaml
  sdp checkpoint export runs/mine/checkpoints hf/
  sdp VERB --help

A run itself is started by a launcher: deepspeed --num_gpus 4 launch/pretrain.py RECIPE
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; 2 for a mistake of the user's, told in one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog="sdp", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"sdp_deepspeed {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, (module, purpose) in VERBS.items():
        verb = verbs.add_parser(name, help=purpose)
        if name in arguments[:1]:
            import_module(module).configure(verb)
    return run_command(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
