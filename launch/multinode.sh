#!/usr/bin/env bash
# Starts launch/pretrain.py on all hosts of a hostfile, once `sdp hosts` has found nothing wrong with them:
#
#   bash launch/multinode.sh [SWITCHES] HOSTFILE [options of launch/pretrain.py]
#   bash launch/multinode.sh --no_ssh --node_rank N [SWITCHES] HOSTFILE [...]    # on every host, without ssh or pdsh
#
# HOSTFILE is DeepSpeed's: lines such as "node-1 slots=8". Switches: --no-checks, --master_addr ADDRESS (default: the
# first host), --master_port PORT (29500), --ssh_port PORT. Ranks write to RUN-FOLDER/logs, a file each; that of rank 0
# is shown. When one fails, the others end within a minute. The same command resumes.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
  echo "error: $*" >&2
  exit 2
}

usage() {
  sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

checks=yes ssh=yes node_rank="" address="" port=29500 ssh_port=""
while [[ "${1:-}" == -* ]]; do
  case $1 in
  --no-checks) checks="" ;;
  --no_ssh) ssh="" ;;
  --node_rank | --master_addr | --master_port | --ssh_port)
    [ $# -gt 1 ] || usage
    case $1 in
    --node_rank) node_rank=$2 ;;
    --master_addr) address=$2 ;;
    --master_port) port=$2 ;;
    --ssh_port) ssh_port=$2 ;;
    esac
    shift
    ;;
  *) usage ;;
  esac
  shift
done
[ $# -gt 0 ] || usage
hostfile=$1
shift
[ -f "$hostfile" ] || fail "$hostfile is no hostfile: expected lines such as \"node-1 slots=8\""
[ -n "$address" ] || address=$(awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$hostfile")
[ -n "$ssh" ] || [[ "$node_rank" =~ ^[0-9]+$ ]] || fail "--no_ssh needs --node_rank: 0 for the hostfile's first host"

folder="" previous=""
for option in "$@"; do
  [ "$previous" != --run-folder ] || folder=$option
  case $option in --run-folder=*) folder=${option#*=} ;; esac
  previous=$option
done
[ -n "$folder" ] || fail "--run-folder is missing: it goes, with all other options of launch/pretrain.py, after HOSTFILE"

if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -f "$here/.venv/bin/activate" ]; then
  # shellcheck source=/dev/null
  source "$here/.venv/bin/activate"
fi
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # DeepSpeed's launcher passes it to all hosts

how=(--hostfile "$hostfile" --master_addr "$address" --master_port "$port")
if [ -n "$ssh" ]; then
  command -v pdsh >/dev/null || fail "pdsh is missing, with which DeepSpeed starts other hosts: install it on this host" \
    "(Debian, Ubuntu: apt install pdsh), or run this on every host by itself, with --no_ssh --node_rank N"
  if [ -n "$checks" ]; then
    python -m sdp_deepspeed hosts --master_addr "$address" --master_port "$port" ${ssh_port:+--ssh_port "$ssh_port"} \
      "$hostfile" -- "$@"
  fi
  # A host that is cut off must not keep pdsh waiting for longer than its ranks are waited for.
  export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} -o ServerAliveInterval=5 -o ServerAliveCountMax=9"
  how+=(--force_multi --no_ssh_check ${ssh_port:+--ssh_port "$ssh_port"})
else
  how+=(--no_ssh --node_rank "$node_rank")
fi

logs=$folder/logs
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
before=" $(cd "$logs" && echo ./*.log) "

# Logs of this start whose name has the given end, the one that was written to last at the end.
new_logs() {
  local name
  for name in $(cd "$logs" && ls -tr); do
    case $name in *"$1") [[ "$before" == *" ./$name "* ]] || echo "$logs/$name" ;; esac
  done
}

follow_rank_0() {
  local log=""
  while [ -z "$log" ]; do
    sleep 0.5
    log=$(new_logs _rank0.log | tail -n 1)
  done
  exec tail -n +1 -F --pid=$$ "$log" 2>/dev/null
}

# What the first ranks that failed said last: the others followed. PyTorch writes a rank before each line of a traceback.
explain() {
  local log num=0 silent="" rank='^(\[rank[0-9]+\]: )?'
  while IFS= read -r log; do
    if ! grep -qE "$rank(error|Traceback)" "$log"; then
      silent+=" ${log##*/}"
      continue
    fi
    num=$((num + 1))
    [ $num -le 4 ] || continue
    echo "== $log"
    grep -E "$rank(error|[A-Za-z_.]*(Error|Exception|Interrupt)\b)" "$log" | tail -n 2
  done < <(new_logs .log)
  [ -z "$silent" ] || echo "== no error, as of ranks that were killed:$silent"
}

follower=""
if [ -n "$ssh" ] || [ "$node_rank" = 0 ]; then
  follow_rank_0 &
  follower=$!
fi
set -m # a process group of its own, so that a signal reaches all of it, whoever gets it here
deepspeed "${how[@]}" --enable_each_rank_log "$logs" "$here/launch/pretrain.py" "$@" &
run=$!
set +m
trap 'kill -INT -- "-$run" 2>/dev/null || true' INT
trap 'kill -TERM -- "-$run" 2>/dev/null || true' TERM
status=0
while wait "$run" && status=0 || status=$?; kill -0 "$run" 2>/dev/null; do :; done # a signal ends the waiting too
if [ -n "$follower" ]; then
  sleep 1 # until it has shown the last lines
  kill "$follower" 2>/dev/null || true
  wait "$follower" 2>/dev/null || true
fi
if [ "$status" -ne 0 ]; then
  echo "error: the run ended with exit code $status; what the first ranks said that failed:" >&2
  explain >&2
fi
exit "$status"
