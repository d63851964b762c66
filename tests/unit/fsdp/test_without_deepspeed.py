"""FSDP2's users need no DeepSpeed: the whole host and the command line run where it cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.repository import ROOT

PROGRAM = """
import sys
sys.modules["deepspeed"] = sys.modules["accelerate"] = None  # so that importing them fails
import torch, torch.distributed as dist, sdp_deepspeed
from sdp_deepspeed.architectures import Branch, register
from sdp_deepspeed.fsdp import clip_grad_norm_, full_state_dict, param_groups
from sdp_deepspeed.fsdp import CheckpointManager

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.body = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)
    def forward(self, x):
        return x + self.body(self.norm(x))

register("__main__.Layer", Branch("mlp", norm="norm", body="body"))
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = sdp_deepspeed.fully_shard(torch.nn.Sequential(Layer(), Layer()), block={"holders": 1})
optimizer = torch.optim.SGD(param_groups(model), lr=0.1)
checkpoints = CheckpointManager(model, optimizer)
model(torch.randn(2, 4)).sum().backward()
assert clip_grad_norm_(model, 1.0) > 0
optimizer.step()
assert len(full_state_dict(model)) == 8
checkpoints.save_checkpoint(sys.argv[2])
assert checkpoints.load_checkpoint(sys.argv[2])[0] == sys.argv[2] + "/global_step1"
from sdp_deepspeed.cli import main
for command in ("env", "checkpoint inspect " + sys.argv[2]):
    assert main(command.split()) == 0, command
import pathlib
pathlib.Path(sys.argv[2], "run.yaml").write_text(
    "model: {model_type: llama, hidden_size: 16, num_attention_heads: 2, num_hidden_layers: 4, vocab_size: 64}\\n"
    "data: {sequence_length: 8}\\ntraining: {}\\n"
    "subnetwork_data_parallel: {coverage: 0.5}\\n"
)
assert main(["estimate", "--ranks", "4", sys.argv[2] + "/run.yaml"]) == 0
assert main(["plan", "--ranks", "4", sys.argv[2] + "/run.yaml"]) == 0
print("done")
"""


def test_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "rendezvous"), str(tmp_path / "saved")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.endswith("done\n"), result.stderr[-2000:]
    assert "Traceback" not in result.stderr
