"""Checkpoints without a training job: `python -m sdp_deepspeed.checkpoint export | inspect | from-zero`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (`{self.prog} --help` lists what there is)\n")


def size(text: str) -> int:
    """Bytes of `5GB`, `200MB` or a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    count = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 200MB, got {text!r}")
    return count


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m sdp_deepspeed.checkpoint", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("export", help="write the dense model of a checkpoint in Hugging Face format")
    verb.add_argument("checkpoint", type=Path, help="its folder, or the folder above (then the latest)")
    verb.add_argument("out", type=Path, help="a new folder")
    verb.add_argument("--dtype", choices=("as-trained", "fp32"), default="as-trained", help="fp32: from the masters")
    verb.add_argument("--max-shard-size", type=size, default="5GB", help="of a file; also the memory that is needed")
    verb.add_argument("--tag", help="which checkpoint of the folder")
    verb.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer is copied")
    verb = verbs.add_parser("inspect", help="say what a checkpoint is, and verify it")
    verb.add_argument("checkpoint", type=Path, help="its folder, or the folder above (then the latest)")
    verb.add_argument("--tag", help="which checkpoint of the folder")
    verb = verbs.add_parser("from-zero", help="convert a ZeRO checkpoint of DeepSpeed to its universal format")
    verb.add_argument("checkpoint", type=Path, help="its folder, or the folder above with `latest`")
    verb.add_argument("out", type=Path, help="the folder that engine.load_checkpoint gets")
    verb.add_argument("--tag", help="which checkpoint of the folder")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 1 if `inspect` finds damage; 2 for a mistake of the user, told in one line."""
    options = _parser().parse_args(arguments)
    try:
        return {"export": _export, "inspect": _inspect, "from-zero": _from_zero}[options.verb](options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _export(options: argparse.Namespace) -> int:
    from sdp_deepspeed.checkpoint.interop.export import ExportFormat, export
    from sdp_deepspeed.checkpoint.storage.folder import find_checkpoint

    form = ExportFormat(fp32=options.dtype == "fp32", max_shard_bytes=options.max_shard_size)
    path = find_checkpoint(options.checkpoint, options.tag)
    print(f"{path} -> {export(path, options.out, form, options.tokenizer)}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from sdp_deepspeed.checkpoint.interop.describe import describe
    from sdp_deepspeed.checkpoint.storage.folder import find_checkpoint

    lines, complete = describe(find_checkpoint(options.checkpoint, options.tag))
    print("\n".join(lines))
    return 0 if complete else 1


def _from_zero(options: argparse.Namespace) -> int:
    from sdp_deepspeed.checkpoint.interop.from_zero import convert

    print(convert(options.checkpoint, options.out, tag=options.tag))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
