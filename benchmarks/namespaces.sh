#!/usr/bin/env bash
# "Nodes" on one machine: two network namespaces joined by a link of a given rate, or several around a switch to which
# each has such a link; one or more ranks in each.
#
#     sudo env PATH="$PATH" benchmarks/namespaces.sh benchmarks/step_time.py --stage 2 --overlap --bucket 5e5 \
#         --output benchmarks/results/overlap_1_gbit.json
#
# All arguments go to the benchmark. Environment: NODES (default 2), RANKS (in each node, default 1), RATE (of tc, default
# 1gbit), SYSCTL (a setting of the kernel in each namespace, such as net.ipv4.tcp_slow_start_after_idle=0), PYTHON (default
# python, with its ninja on the PATH), PORT. Needs iproute2. Nothing but the namespaces is touched, and they go away with this
# script, however it ends.
set -euo pipefail

if [[ $EUID -ne 0 ]]; then
    echo "namespaces.sh: making network namespaces needs root: run it with sudo" >&2
    exit 2
fi
if [[ $# -eq 0 ]]; then
    echo "namespaces.sh: which benchmark? Usage: sudo $0 benchmarks/step_time.py [its options]" >&2
    exit 2
fi
for tool in ip tc; do
    command -v "$tool" >/dev/null || { echo "namespaces.sh: $tool is missing: install iproute2" >&2; exit 2; }
done

nodes=${NODES:-2}
per_node=${RANKS:-1}
rate=${RATE:-1gbit}
python=${PYTHON:-python}
port=${PORT:-29511}
switch="sdp$$switch"
names=()
for ((i = 0; i < nodes; i++)); do names+=("sdp$$node$i"); done
ranks=()

# shellcheck disable=SC2329  # the trap calls it
clean_up() {
    trap - EXIT
    trap '' INT TERM # whoever stops this script may signal twice, and half a clean-up leaves namespaces behind
    for pid in "${ranks[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    for name in "${names[@]}" "$switch"; do ip netns delete "$name" 2>/dev/null || true; done # links go with their ends
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The burst holds the largest packet that the kernel makes before a card would cut it up, and lasts 1 ms at 1 Gb/s.
slow_down() { tc -netns "$1" qdisc add dev "$2" root tbf rate "$rate" burst 128kb limit 1mb; }

for name in "${names[@]}"; do ip netns add "$name"; done
# All ends are made inside namespaces, so that the machine's own interfaces never see them.
if ((nodes == 2)); then
    ip -netns "${names[0]}" link add name wire type veth peer name wire netns "${names[1]}"
else
    ip netns add "$switch"
    ip -netns "$switch" link add name switch type bridge
    ip -netns "$switch" link set switch up
    for ((i = 0; i < nodes; i++)); do
        ip -netns "${names[$i]}" link add name wire type veth peer name "port$i" netns "$switch"
        ip -netns "$switch" link set "port$i" master switch up
        slow_down "$switch" "port$i"
    done
fi
for ((i = 0; i < nodes; i++)); do
    name=${names[$i]}
    ip -netns "$name" address add "10.203.0.$((i + 1))/24" dev wire
    ip -netns "$name" link set lo up
    ip -netns "$name" link set wire up
    slow_down "$name" wire
    if [[ -n ${SYSCTL:-} ]]; then ip netns exec "$name" sysctl --quiet --write "$SYSCTL"; fi
done

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GLOO_SOCKET_IFNAME=wire SDP_LINK_RATE=$rate
export SDP_LINK_SETTING=${SYSCTL:-}
export DS_ACCELERATOR=cpu # the ranks of both namespaces would share one GPU, which NCCL refuses
export MASTER_ADDR=10.203.0.1 MASTER_PORT=$port WORLD_SIZE=$((nodes * per_node)) LOCAL_SIZE=$per_node
for ((i = 0; i < nodes; i++)); do
    for ((j = 0; j < per_node; j++)); do
        CROSS_RANK=$i RANK=$((i * per_node + j)) LOCAL_RANK=$j ip netns exec "${names[$i]}" "$python" "$@" &
        ranks+=($!)
    done
done
status=0
for _ in "${ranks[@]}"; do
    wait -n || { status=$?; break; } # when one fails, the other would wait for it
done
exit "$status"
