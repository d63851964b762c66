"""Commands in README.md and docs/guide.md: `sdp` runs as printed; what needs a network, a GPU for each rank or
several nodes is parsed as its launcher and program do."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deepspeed.launcher.runner import parse_args as parse_deepspeed
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser as torchrun_parser
from transformers import LlamaConfig

import sdp_deepspeed.config.recipe
from recipe import read_recipe
from sdp_deepspeed.cli import main
from sdp_deepspeed.config import KEY
from sdp_deepspeed.teams import launch
from sdp_deepspeed.teams.join import LIGHTHOUSE, NUMBER
from tests.helpers.documents import blocks_of
from tests.helpers.repository import ROOT

COMMANDS = {
    shlex.join(words): words
    for block in blocks_of("bash")
    for line in block.text.splitlines()
    if (words := shlex.split(line, comments=True))
}


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, to which commands may write, with a model; and installed recipes."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 8, "num_hidden_layers": 4}
    LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(tmp_path / "my_model")
    for name in ("configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sdp_deepspeed.config.recipe, "_INSTALLED", ROOT / "configs/recipes")


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "export" or "=" in words[0]:  # variables of teams, before a command or by themselves
        variable, *words = words[words[0] == "export" :]
        assert variable.partition("=")[0] in (NUMBER, LIGHTHOUSE, "RUST_LOG")
    if not words:
        return
    if words[:2] == ["sdp", "teams"]:  # test_teams.py runs the example
        monkeypatch.setattr(launch, "run_teams", lambda _, __, command: int(not Path(command[0]).is_file()))
        assert main(words[1:]) == 0
    elif words[0] == "sdp":
        assert main(words[1:]) == 0
    elif words[:2] == ["pip", "install"]:
        check_requirements([word for word in words[2:] if not word.startswith("--")])
    elif words[0] == "torchft_lighthouse":
        program = shutil.which(words[0], path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if program is None:
            pytest.skip("torchft is not installed")
        known = subprocess.run([program, "--help"], check=True, timeout=60, capture_output=True, text=True).stdout
        assert all(word in known for word in words if word.startswith("--"))
    elif words[0] == "bash":
        subprocess.run(["bash", "-n", *words[1:]], check=True, timeout=60)
    else:
        check_program(words)


def check_requirements(requirements: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for text in requirements:
        requirement = Requirement(text.rpartition("/")[2])
        if "/" in text:  # of this package
            assert requirement.extras <= extras.keys()


def check_program(words: list[str]) -> None:
    """A program of launch/ with its launcher."""
    launcher, *arguments = words
    if launcher == "deepspeed":
        options: Any = parse_deepspeed(arguments)
        program = [options.user_script, *options.user_args]
    elif launcher == "torchrun":
        options = torchrun_parser().parse_args(arguments)
        program = [options.training_script, *options.training_script_args]
    elif launcher == "sbatch":
        (script,) = [word for word in arguments if word.endswith(".sbatch")]
        assert Path(script).is_file()
        program = arguments[arguments.index(script) + 1 :]
    else:
        assert launcher == "python"
        program = arguments
    path, *given = program
    assert Path(path).is_file()
    given = ["configs/recipes/llama_134m.yaml" if word == "RECIPE" else word for word in given]
    host = KEY if path.endswith("fsdp2.py") else "deepspeed"
    assert read_recipe("", ("model", "data", "training", host), given).model
