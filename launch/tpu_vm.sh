#!/usr/bin/env bash
# Runs routed on a Cloud TPU VM of one host or many.
#
#   launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [OPTIONS] [-- ROUTED'S ARGUMENTS]
#   launch/tpu_vm.sh all --name=moe --zone=us-central2-b --type=v4-8 -- --config=experiments/gmm_router.py
#
#   up      make the VM, or take the one there is; copy this checkout to all workers and install it
#   run     start `python -m routed.main ARGUMENTS` on all workers, in a session that outlives the connection
#   log     follow worker 0 until the run ends, and end with its exit code
#   fetch   copy the results to runs/: from the bucket, or from worker 0
#   stop    let the run save and end; `run` goes on from there
#   down    delete the VM
#   all     up, run, log, fetch, and down if the run ended well
#
#   --type=TYPE         v4-8, v5litepod-256, ... (up, run, all)
#   --version=RUNTIME   software of the VM; default: the one for JAX on TYPE
#   --project=PROJECT   default: gcloud's
#   --spot              cheaper; may be preempted
#   --queued            ask for it as a queued resource, and wait for it
#   --watch             (all) after a preemption make the VM again and run the same command, which goes on
#   --keep              (all) do not delete the VM
#   --dry_run           print every command, run none
#
# Several hosts, and --watch, need --workdir=gs://BUCKET/FOLDER among routed's arguments. POLL is the number of seconds between
# two looks at the VM (default 30). What is copied: files that git tracks or would track.

set -euo pipefail

fail() { echo "error: $1; see $0 --help" >&2; exit 2; }
quote() { sed -E "s/'([-[:alnum:]_@%+=:,./]+)'/\1/g" <<< "${*@Q}"; } # plain words stay plain

verb='' name='' zone='' type='' version='' project='' spot='' queued='' watch='' keep='' dry_run=''
options=()
while (($#)); do
  case $1 in
    --help) awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"; exit ;;
    --name=* | --zone=* | --type=* | --version=* | --project=*) declare "${1:2}" ;;
    --spot | --queued | --watch | --keep | --dry_run) declare "${1:2}=1" ;;
    --) break ;;
    -*) fail "unknown option $1" ;;
    *) [[ ! $verb ]] || fail "unexpected argument $1: routed's arguments stand after --"; verb=$1; shift; continue ;;
  esac
  options+=("$1")
  shift
done
arguments=("${@:2}") workdir=''
for argument in "${arguments[@]}"; do
  [[ $argument != --workdir=* ]] || workdir=${argument#*=}
done

[[ $verb =~ ^(up|run|log|fetch|stop|down|all)$ ]] || fail "command '$verb': use up, run, log, fetch, stop, down or all"
[[ $name ]] || fail "--name is missing: how the VM is called, e.g. --name=moe"
[[ $zone ]] || fail "--zone is missing: where the VM is, e.g. --zone=us-central2-b"
if [[ $verb =~ ^(up|run|all)$ ]]; then
  [[ $type =~ -[0-9]+$ ]] || fail "--type='$type': name a TPU, e.g. --type=v4-8"
fi
if [[ $verb =~ ^(run|all)$ ]]; then
  ((${#arguments[@]})) || fail "no arguments for routed: end the command with -- --config=FILE"
  hosts=$((${type##*-} > 8 ? 2 : 1)) # or more
  [[ $workdir = gs://* || ($hosts = 1 && ! $watch) ]] ||
    fail "several hosts, or --watch, need a folder that outlives a VM: add --workdir=gs://BUCKET/FOLDER after --"
  ((hosts == 1)) || arguments+=(--coordinator=auto)
fi
[[ $dry_run ]] || command -v gcloud > /dev/null ||
  fail "gcloud is not installed: https://cloud.google.com/sdk/docs/install, then gcloud auth login"

case $type in # https://cloud.google.com/tpu/docs/runtimes
  v5litepod-*) software=v2-alpha-tpuv5-lite ;;
  v5p-*) software=v2-alpha-tpuv5 ;;
  v6e-*) software=v2-alpha-tpuv6e ;;
  *) software=tpu-ubuntu2204-base ;;
esac
software=${version:-$software} poll=${POLL:-30} tpus=(gcloud compute tpus) where=("--zone=$zone")
[[ ! $project ]] || where+=("--project=$project")

errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
exec 3>&1
execute() { # or print, also where the output is asked for
  if [[ $dry_run ]]; then quote "$@" >&3; else "$@" 3>&-; fi
}
on() { # on WORKER COMMAND
  execute "${tpus[@]}" tpu-vm ssh "$name" "${where[@]}" "--worker=$1" "--command=$2"
}

create() {
  if [[ $queued ]]; then
    execute "${tpus[@]}" queued-resources create "$name" "--node-id=$name" "${where[@]}" \
      "--accelerator-type=$type" "--runtime-version=$software" ${spot:+--spot}
  else
    execute "${tpus[@]}" tpu-vm create "$name" "${where[@]}" \
      "--accelerator-type=$type" "--version=$software" ${spot:+--spot}
  fi
}
down() {
  if [[ $queued ]]; then
    execute "${tpus[@]}" queued-resources delete "$name" "${where[@]}" --force --quiet
  else
    execute "${tpus[@]}" tpu-vm delete "$name" "${where[@]}" --quiet
  fi
}
state() { # nothing if there is no such VM; fails if gcloud cannot tell
  local said
  if [[ $queued ]]; then
    execute "${tpus[@]}" queued-resources describe "$name" "${where[@]}" '--format=value(state.state)'
  else
    execute "${tpus[@]}" tpu-vm describe "$name" "${where[@]}" '--format=value(state)'
  fi 2> "$errors" || { said=$(< "$errors"); [[ $said = *NOT_FOUND* ]] || { echo "$said" >&2; return 1; }; }
}

patiently() { # the state, also if the network is down here for an hour or so
  for _ in {1..100}; do
    ! state || return 0
    sleep "$poll"
  done
}

up() {
  local now archive=${TMPDIR:-/tmp}/routed-$name.tgz commit
  commit=$(git -C "$(dirname "$0")/.." describe --always --dirty --abbrev=12 2> /dev/null || true)
  # Before there is a VM to pay for. Git lists files that were deleted here, too.
  execute bash -o pipefail -c "cd $(quote "$(dirname "$0")/..") &&\
 git ls-files -z --cached --others --exclude-standard |\
 while IFS= read -rd '' file; do [[ ! -e \$file && ! -L \$file ]] || printf '%s\\0' \"\$file\"; done |\
 tar -czf $(quote "$archive") --null -T -"
  while true; do
    now=$(state)
    case $now in
      READY | ACTIVE) break ;;
      '') create; [[ ! $dry_run ]] || break ;;
      PREEMPTED | TERMINATED | SUSPENDED) down ;;
      FAILED | STOPPED | HIDDEN | UNKNOWN) fail "$name is $now: $(quote "$0" down "${options[@]}") deletes it" ;;
      *) echo "$name is $now" >&2; sleep "$poll" ;;
    esac
  done
  execute "${tpus[@]}" tpu-vm scp "$archive" "$name:routed.tgz" "${where[@]}" --worker=all
  on all "mkdir -p routed && tar -xzf routed.tgz -C routed && cd routed &&\
 echo $commit > commit && python3 -m pip install -q uv &&\
 python3 -m uv venv -q --allow-existing --python 3.11 && python3 -m uv pip install -q --python .venv -e '.[tpu,gcs]'"
}

# A worker keeps routed/run.log, run.pid while a run goes on, and run.code when it has ended.
run() {
  local session
  session="$(quote .venv/bin/python -m routed.main "${arguments[@]}") & echo \$! > run.pid; wait \$!; echo \$? > run.code"
  on all "cd routed && if kill -0 \$(cat run.pid 2> /dev/null) 2> /dev/null; then echo 'a run goes on here: log follows it, stop ends it';\
 else rm -f run.pid run.code; setsid bash -c $(quote "$session") > run.log 2>&1 < /dev/null &\
 until [ -s run.pid ]; do sleep 0.1; done; fi"
}
stop() { on all "kill \$(cat routed/run.pid) 2> /dev/null || echo 'no run goes on here'"; }
log() {
  local code
  while true; do
    code=0
    on 0 "cd routed && [ -e run.pid ] || { echo 'error: nothing was run here; start it with run' >&2; exit 102; };\
 tail -n +1 -F --pid=\$(cat run.pid) run.log; sleep 1; exit \$((100 + \$(cat run.code || echo 1)))" || code=$?
    [[ ! $dry_run ]] || return 0
    ((code < 100 || code == 255)) || return $((code - 100))
    [[ $(patiently) =~ ^(READY|ACTIVE)$ ]] || return 1
    sleep "$poll" # the connection broke, the VM is there
  done
}
fetch() {
  local from=${workdir:-runs} to=runs
  if [[ $from = gs://* ]]; then
    to=runs/$(basename "$from")
    execute mkdir -p "$to"
    execute gcloud storage rsync --recursive '--exclude=^compiled/' "$from" "$to"
  else
    [[ $from != runs ]] || to=.
    [[ $from = [/~]* ]] || from=routed/$from
    execute mkdir -p "$to"
    execute "${tpus[@]}" tpu-vm scp --recurse "$name:$from" "$to" "${where[@]}" --worker=0
  fi
}

preempted() { # the VM tells some time after the run
  local now
  for _ in 1 2 3 4; do
    sleep "$poll"
    now=$(patiently)
    [[ ! $now =~ ^(PREEMPTED|TERMINATED|SUSPENDING|SUSPENDED)$ ]] || return 0
  done
  return 1
}
all() {
  local code
  up
  while true; do
    set +e
    (set -e; run; log)
    code=$?
    set -e
    if ((code == 0 || code == 3)) || [[ ! $watch ]] || ! preempted; then break; fi
    echo "$name was preempted: making it again" >&2
    until "$0" up "${options[@]}"; do
      (($? != 2)) || exit 2
      sleep "$poll"
    done
  done
  if ((code && code != 3)); then # 3: finished, and some runs diverged
    echo "error: the run ended with code $code, and $name is still there: see it with log, go on with all, delete it with down" >&2
    exit "$code"
  fi
  fetch
  [[ $keep ]] || down
  return "$code"
}

"$verb"
