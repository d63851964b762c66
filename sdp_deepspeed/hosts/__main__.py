"""`sdp hosts`: checks before the long start, a line for each host."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from sdp_deepspeed.command_parser import Parser, positive
from sdp_deepspeed.hosts.hostfile import read_hostfile
from sdp_deepspeed.hosts.inspection import Inspection, Rendezvous
from sdp_deepspeed.hosts.remote import Remote, ssh_command
from sdp_deepspeed.messages import listed

DEFAULT_PORT = 29500  # DeepSpeed's


def configure(parser: Parser) -> None:
    """Arguments of `sdp hosts`."""
    parser.description = (
        "Check the hosts of a run before it starts: reachable by ssh, same versions, same config and plan, enough\n"
        "devices, clocks, a free port, addresses that reach each other, a run folder that all see. Start it where the\n"
        "run will be started, with the options that launch/pretrain.py will get after --:\n\n"
        "  sdp hosts my_hosts -- --model model.json --deepspeed_config config.json --run-folder /shared/run --steps 9"
    )
    add = parser.add_argument
    add("hostfile", type=Path, help='DeepSpeed\'s hostfile: lines such as "node-1 slots=8"')
    add("--master_addr", help="where ranks will meet (default: the first host's name)")
    add("--master_port", type=positive, default=DEFAULT_PORT, help=f"its port (default {DEFAULT_PORT})")
    add("--ssh_port", type=positive, help="of all hosts (default: ssh's own)")
    add("options", nargs="*", metavar="OPTION", help="after --: options of launch/pretrain.py; none checks no settings")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    hosts = read_hostfile(options.hostfile)
    where = Rendezvous(options.master_addr or hosts[0].name, options.master_port)
    with ExitStack() as stack:
        remotes = {host.name: stack.enter_context(Remote(ssh_command(host.name, options.ssh_port))) for host in hosts}
        inspection = Inspection(hosts, remotes, where)
        inspection.run(options.options)
    width = max(len(host.name) for host in hosts)
    for name, verdict in inspection.verdicts.items():
        print(f"{name:<{width}}  {verdict}")
    failed = [name for name, verdict in inspection.verdicts.items() if verdict.problems]
    if failed:
        raise ValueError(f"{len(failed)} of {len(hosts)} hosts cannot take part: {listed(failed)}")
    return 0
