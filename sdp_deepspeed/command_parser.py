"""What all commands have in common: one parser, one way to tell a mistake, one exit code for it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.messages import NEEDS_DEEPSPEED, lacks_deepspeed

USER_ERROR_EXIT_CODE = 2
_INTERRUPTED_EXIT_CODE = 130  # what a shell gives a command that SIGINT ended


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """All help in one column, also that of verbs, whose indentation argparse forgets."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, max_help_position=28, **settings)
        self._action_max_length = 28


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print with its usage, so that the caller tells it in one line, and by one rank."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ({self.prog} --help lists the options)")


def run_command(parser: Parser, arguments: Sequence[str] | None) -> int:
    """Parse, and call what the verb set as `run`.

    Args:
        arguments: without the program's name; None means those of this process.

    Returns:
        The exit code: what `run` returns, or 2 for a mistake of the user's, which is told in one line.
    """
    try:
        options = parser.parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has enough of it, as in `sdp estimate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except ModuleNotFoundError as error:
        if not lacks_deepspeed(error):
            raise
        print(f"error: this {NEEDS_DEEPSPEED}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        return _INTERRUPTED_EXIT_CODE
    return code


def positive(text: str) -> int:
    """An argument's type: a whole number above 0."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def read_json(path: Path, option: str) -> dict[str, Any]:
    """A JSON object from `path`; ValueError names the command line's `option` and where the file is wrong."""
    try:
        content = json.loads(regular(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{option}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{option}: {path} is not text: expected a JSON file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: {path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise ValueError(f"{option}: {path}: not JSON that can be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{option}: {path} holds a {type(content).__name__}: expected a JSON object {{...}}")
    return content
