#!/usr/bin/env bash
# Runs routed as N processes on this machine that find each other as hosts do.
#
#   launch/local_processes.sh [--dry_run] [--devices=D] N -- ROUTED'S ARGUMENTS
#   launch/local_processes.sh --devices=4 2 -- --config=experiments/t5_mc4.py:smoke --workdir=runs/two
#
# N processes of D CPU devices each (default 1), on a free port. Lines start with the number of their process. SIGINT and
# SIGTERM go to all processes, which save and end. The exit code is that of the first process, by number, that failed.
# PYTHON chooses the interpreter; without it .venv/bin/python of this checkout, and without that python3.

set -euo pipefail

fail() { echo "error: $1; see $0 --help" >&2; exit 2; }
quote() { sed -E "s/'([-[:alnum:]_@%+=:,./]+)'/\\1/g" <<< "${*@Q}"; } # plain words stay plain

dry_run='' devices=1 count=''
while (($#)); do
  case $1 in
    --help) awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"; exit ;;
    --dry_run) dry_run=1 ;;
    --devices=*) devices=${1#*=} ;;
    --) break ;;
    -*) fail "unknown option $1" ;;
    *) [[ ! $count ]] || fail "unexpected argument $1: routed's arguments stand after --"; count=$1 ;;
  esac
  shift
done
[[ $count =~ ^[1-9][0-9]*$ ]] || fail "N='$count': give the number of processes, e.g. 2"
[[ $devices =~ ^[1-9][0-9]*$ ]] || fail "--devices=$devices: give the number of devices of each process, e.g. 2"
(($# > 1)) || fail "no arguments for routed: end the command with -- --config=FILE"
shift

python=$(dirname "$0")/../.venv/bin/python
[[ -x $python ]] || python=python3
port=$((10000 + RANDOM % 20000))
while (: < "/dev/tcp/localhost/$port") 2> /dev/null; do port=$((port + 1)); done

set -m # each process in a group of its own: only this script hears the terminal's Ctrl-C
processes=() readers=()
trap 'kill -INT "${processes[@]}" 2> /dev/null || true' INT
trap 'kill -TERM "${processes[@]}" 2> /dev/null || true' TERM
for ((i = 0; i < count; i++)); do
  command=("${PYTHON:-$python}" -m routed.main "$@" "--coordinator=localhost:$port" "--num_processes=$count" "--process_id=$i")
  if [[ $dry_run ]]; then
    echo "JAX_NUM_CPU_DEVICES=$devices $(quote "${command[@]}")"
    continue
  fi
  exec {lines}> >(trap '' INT TERM; while IFS= read -r line || [[ $line ]]; do echo "[$i] $line"; done)
  readers+=("$!")
  JAX_NUM_CPU_DEVICES=$devices "${command[@]}" < /dev/null >&"$lines" 2>&1 {lines}>&- &
  processes+=("$!")
  exec {lines}>&-
done

code=0
for process in "${processes[@]}"; do
  while kill -0 "$process" 2> /dev/null; do wait "$process" || true; done # a trap ends `wait` before the process ends
  status=0
  wait "$process" || status=$?
  ((code)) || code=$status
done
for reader in "${readers[@]}"; do wait "$reader" || true; done
exit "$code"
