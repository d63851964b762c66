"""`sdp checkpoint`: checkpoints without a training job."""

from __future__ import annotations

import argparse
from pathlib import Path

from sdp_deepspeed.command_parser import Parser
from sdp_deepspeed.sizes import byte_count


def configure(parser: Parser) -> None:
    """Arguments of `sdp checkpoint`."""
    parser.description = "Look into checkpoints and convert them, without a training job and in the memory of one file."
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _configure_inspect(actions.add_parser("inspect", help="say what a checkpoint is, and verify it"))
    _configure_export(actions.add_parser("export", help="write its dense model in Hugging Face's format"))
    _configure_from_zero(actions.add_parser("from-zero", help="convert a ZeRO checkpoint of DeepSpeed's"))


def _configure_inspect(parser: Parser) -> None:
    parser.description = (
        "Say what a checkpoint is, and verify sizes and hashes of its files. Exit code 1: damaged, or `latest` is."
    )
    parser.add_argument("checkpoint", type=Path, help="its folder, or the folder above (then the latest)")
    parser.add_argument("--tag", help="which checkpoint of the folder")
    parser.set_defaults(run=_inspect)


def _configure_export(parser: Parser) -> None:
    parser.description = "Write the dense model of a checkpoint in Hugging Face's format."
    parser.add_argument("checkpoint", type=Path, help="its folder, or the folder above (then the latest)")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--dtype", choices=("as-trained", "fp32"), default="as-trained", help="fp32: from the masters")
    parser.add_argument(
        "--max-shard-size", type=byte_count, default="5GB", help="of a file; also the memory that is needed (5GB)"
    )
    parser.add_argument("--tag", help="which checkpoint of the folder")
    parser.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer is copied")
    parser.set_defaults(run=_export)


def _configure_from_zero(parser: Parser) -> None:
    parser.description = "Convert a ZeRO-1, 2 or 3 checkpoint of DeepSpeed to its universal format, which loads here."
    parser.add_argument("checkpoint", type=Path, help="its folder, or the folder above with `latest`")
    parser.add_argument("out", type=Path, help="the folder that engine.load_checkpoint gets")
    parser.add_argument("--tag", help="which checkpoint of the folder")
    parser.set_defaults(run=_from_zero)


def _export(options: argparse.Namespace) -> int:
    from sdp_deepspeed.checkpoint.interop.export import ExportFormat, export
    from sdp_deepspeed.checkpoint.storage.folder import find_checkpoint

    form = ExportFormat(fp32=options.dtype == "fp32", max_shard_bytes=options.max_shard_size)
    path = find_checkpoint(options.checkpoint, options.tag)
    print(f"{path} -> {export(path, options.out, form, options.tokenizer)}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from sdp_deepspeed.checkpoint.interop.describe import describe
    from sdp_deepspeed.checkpoint.storage.folder import broken_latest, find_checkpoint

    lines, complete = describe(find_checkpoint(options.checkpoint, options.tag))
    if remark := broken_latest(options.checkpoint, options.tag):
        lines.append(f"{remark}; this is the newest complete one")
    print("\n".join(lines))
    return 0 if complete and remark is None else 1


def _from_zero(options: argparse.Namespace) -> int:
    from sdp_deepspeed.checkpoint.interop.from_zero import convert

    print(convert(options.checkpoint, options.out, tag=options.tag))
    return 0
