"""Four teams that average their weights every 10 steps: `sdp teams 4 -- launch/examples/with_teams.py runs/teams`.

Kill a team in the middle, and the others go on; docs/guide.md says how to start teams on nodes. Start a killed one
again by `SDP_TEAM=2 TORCHFT_LIGHTHOUSE=... python launch/examples/with_teams.py runs/teams`, with the address that `sdp
teams` has printed, and `CUDA_VISIBLE_DEVICES=2` if each team has a GPU; it takes over the weights of the others.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder for the model")
    parser.add_argument("--teams", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group()  # of this team alone
    torch.manual_seed(0)
    with sdp_deepspeed.Init():  # weights of this team only, with output projections that start smaller
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SHAPE))
    steps = {"teams": options.teams, "every": EVERY}
    team = sdp_deepspeed.join(model, {"coverage": [{"coverage": 0.5, "whole_ends": 1}], "local_steps": steps})
    trained = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    team.start()  # a team that comes back takes over the weights of the others
    rows = torch.tensor(list(Path(argparse.__file__).read_bytes())).split(64)[:-1]  # some text, byte by byte
    rows, held_out = rows[:-8], torch.stack(rows[-8:]).to(device)
    while team.num_steps < options.steps:
        first = ((team.num_steps * options.teams + team.number) * size + rank) * 8
        batch = torch.stack([rows[i % len(rows)] for i in range(first, first + 8)]).to(device)
        trained(input_ids=batch, labels=batch).loss.backward()  # the loss of this team's subnetwork
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if team.step() and rank == 0:
            print(f"step {team.num_steps}: met teams {team.present}")
    with team.dense(), torch.no_grad():  # all teams together
        loss = model(input_ids=held_out, labels=held_out).loss
    if rank == 0:
        print(f"loss of the dense model: {loss.item():.4f}")
    team.save_pretrained(options.output / "hf")  # all teams; the first one writes
    team.leave()


if __name__ == "__main__":
    main()
