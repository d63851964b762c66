#!/usr/bin/env bash
# Slow links on one machine: "nodes" are network namespaces, joined by a link of a given rate (two nodes) or by a switch
# to which each has such a link; one or more ranks in each. Each node has cores of its own, as far as there are enough, so
# that the others are no faster if one is lost.
#
#     sudo env PATH="$PATH" benchmarks/links.sh       # all that docs/results.md shows of links
#     sudo env PATH="$PATH" RATE=250mbit NODES=4 RANKS=1 benchmarks/links.sh benchmarks/time_to_loss.py --output ...
#
# Arguments are a benchmark and its options. Environment: RATE (tc's, default 1gbit), NODES and RANKS (in each node;
# default 2), PORT. Needs iproute2 and util-linux. Only namespaces are made, and they go away with this
# script, however it ends.
set -euo pipefail

if [[ $EUID -ne 0 ]]; then
    echo "links.sh: network namespaces need root; run it with sudo" >&2
    exit 2
fi
for tool in ip tc unshare taskset; do
    command -v "$tool" >/dev/null || { echo "links.sh: $tool is missing; install iproute2 and util-linux" >&2; exit 2; }
done

if [[ $# -eq 0 ]]; then
    here=$(dirname "${BASH_SOURCE[0]}")
    RATE=1gbit "$0" "$here/time_to_loss.py" --output "$here/results/time_to_loss_1gbit.json"
    for rate in 100mbit 20mbit; do # the limit is in seconds
        RATE=$rate "$0" "$here/time_to_loss.py" --limit 40 --output "$here/results/time_to_loss_$rate.json"
    done
    RATE=20mbit NODES=4 RANKS=1 "$0" "$here/time_to_loss.py" --set faults --output "$here/results/lost_team_20mbit.json"
    exit
fi

nodes=${NODES:-2} per_node=${RANKS:-2} rate=${RATE:-1gbit}
cores=$(nproc) switch="sdp$$switch" names=() ranks=()
for ((i = 0; i < nodes; i++)); do names+=("sdp$$node$i"); done

# shellcheck disable=SC2329  # the trap calls it
clean_up() {
    trap - EXIT
    trap '' INT TERM # a second signal must not leave namespaces behind
    for pid in "${ranks[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    for name in "${names[@]}" "$switch"; do ip netns delete "$name" 2>/dev/null || true; done # with their links
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The burst holds the largest packet that the kernel makes before a card would cut it up, and lasts 1 ms at 1 Gb/s.
slow_down() { tc -netns "$1" qdisc add dev "$2" root tbf rate "$rate" burst 128kb limit 1mb; }

for name in "${names[@]}"; do ip netns add "$name"; done
if ((nodes == 2)); then # all ends are made inside namespaces, so that the machine's own interfaces never see them
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
    ip -netns "${names[$i]}" address add "10.203.0.$((i + 1))/24" dev wire
    ip -netns "${names[$i]}" link set lo up
    ip -netns "${names[$i]}" link set wire up
    slow_down "${names[$i]}" wire
done

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GLOO_SOCKET_IFNAME=wire SDP_LINK_RATE=$rate
export DS_ACCELERATOR=cpu # NCCL refuses ranks of several nodes on one GPU
export MASTER_ADDR=10.203.0.1 MASTER_PORT=${PORT:-29511} WORLD_SIZE=$((nodes * per_node)) LOCAL_SIZE=$per_node
for ((i = 0; i < nodes; i++)); do
    for ((j = 0; j < per_node; j++)); do
        # Host names say which ranks share a node.
        # shellcheck disable=SC2016
        CROSS_RANK=$i RANK=$((i * per_node + j)) LOCAL_RANK=$j ip netns exec "${names[$i]}" \
            taskset -c "$(seq -s, $((i % cores)) "$nodes" $((cores - 1)))" unshare --uts sh -c 'hostname "$1"; shift; exec "$@"' sh "${names[$i]}" python "$@" &
        ranks+=($!)
    done
done
status=0
for _ in "${ranks[@]}"; do
    wait -n || { status=$?; break; } # when one fails, the others would wait for it
done
exit "$status"
