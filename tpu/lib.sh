# shellcheck shell=bash
# Shared by the scripts: settings, options, and the two ways to call a cloud command. Sourced, never executed.
# Works with bash 3.2 (macOS): no possibly empty array is expanded.

tpu=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$tpu")
exec 3>&1 # `show` writes here, even when standard output is captured

refuse() { # invalid input: one sentence, exit code 2
  echo "gspax: $*" >&2
  exit 2
}

show() {
  printf '+' >&3
  printf ' %q' "$@" >&3
  printf '\n' >&3
}

call() { # print a cloud command, and run it except in a dry run
  show "$@"
  [[ $dry_run == 1 ]] || "$@"
}

query() { # the same for a command whose output is captured, perhaps repeatedly: printed in a dry run only
  if [[ $dry_run == 1 ]]; then show "$@"; else "$@"; fi
}

require_integer() { # name value: an integer of at least 1
  [[ $2 =~ ^[1-9][0-9]*$ ]] || refuse "$1: wanted an integer of at least 1, got '$2'"
}

read_settings() {
  local file=${GSPAX_TPU_CONFIG:-$tpu/config.sh}
  if [[ -f $file ]]; then
    # shellcheck source=/dev/null
    source "$file"
  elif [[ -n ${GSPAX_TPU_CONFIG:-} ]]; then
    refuse "GSPAX_TPU_CONFIG: there is no file $file"
  fi
}

# Reads --dry-run, --spot and --node-count N (or --node-count=N) up to the first other word. `used` counts the words read,
# for the caller to `shift "$used"`. They are exported, so that a script passes them on to the scripts that it calls.
read_options() {
  read_settings
  used=0
  while [[ ${1:-} == -* ]]; do
    case $1 in
      --dry-run) GSPAX_DRY_RUN=1 ;;
      --spot) GSPAX_SPOT=1 ;;
      --node-count=*) GSPAX_SLICES=${1#*=} ;;
      --node-count)
        GSPAX_SLICES=${2:-}
        [[ $# -gt 1 ]] && { shift; used=$((used + 1)); }
        ;;
      -h | --help)
        sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
      *) refuse "$(basename "$0") has no option $1 (see $(basename "$0") --help)" ;;
    esac
    shift
    used=$((used + 1))
  done
  export GSPAX_DRY_RUN=${GSPAX_DRY_RUN:-0} GSPAX_SPOT=${GSPAX_SPOT:-0} GSPAX_SLICES=${GSPAX_SLICES-1}
  dry_run=$GSPAX_DRY_RUN
  require_integer --node-count "$GSPAX_SLICES"
}

need() { # settings that are required
  local name
  for name in "$@"; do
    [[ -n ${!name:-} ]] || refuse "$name is not set (copy tpu/config.example.sh to tpu/config.sh, or export it)"
  done
}

tools() { # programs that are required
  local name
  [[ $dry_run == 1 ]] && return
  for name in "$@"; do
    command -v "$name" > /dev/null || refuse "$name is not installed, or not on the PATH"
  done
}

experiment() { # FILE [a.b=c ...]: an experiment file, relative to the checkout's root; a dry run also checks the overrides
  [[ -n ${1:-} ]] || refuse "wanted an experiment file, as in $(basename "$0") experiments/sort_gspo.py"
  [[ -f $root/$1 ]] || refuse "$1: wanted an experiment file, relative to the root of the checkout"
  [[ $dry_run == 1 ]] || return 0
  if [[ -x $root/.venv/bin/gspax ]]; then
    (cd "$root" && .venv/bin/gspax train "$@" --dry-run > /dev/null) || exit
  else
    echo "The experiment is not checked: $root/.venv/bin/gspax does not exist (make train creates it)."
  fi
}

new_secret() { # make the secret by which the processes of a run recognize each other; print its file, ours alone to read
  local file=$root/build/gspax.secret
  if [[ $dry_run != 1 ]]; then
    mkdir -p "$root/build"
    rm -f "$file"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$file")
  fi
  echo "$file"
}

# GKE

count_hosts() { # print the number of hosts of a slice
  local chips
  [[ $GSPAX_TOPOLOGY =~ ^[1-9][0-9]*(x[1-9][0-9]*)+$ ]] ||
    refuse "GSPAX_TOPOLOGY: wanted the chips along each dimension, as in 4x4, got '$GSPAX_TOPOLOGY'"
  require_integer GSPAX_CHIPS "$GSPAX_CHIPS"
  chips=$((${GSPAX_TOPOLOGY//x/*}))
  [[ $((chips % GSPAX_CHIPS)) == 0 ]] ||
    refuse "GSPAX_CHIPS: wanted a divisor of the $chips chips of a slice, got $GSPAX_CHIPS"
  echo $((chips / GSPAX_CHIPS))
}

# Queued resources

queued() { # call|query COMMAND ARGUMENT...: `gcloud compute tpus queued-resources` in our project and zone
  local how=$1
  shift
  "$how" gcloud compute tpus queued-resources "$@" --project="$GSPAX_PROJECT" --zone="$GSPAX_ZONE"
}

on_hosts() { # run a shell command on every host of every slice
  queued call ssh "$GSPAX_NAME" --node=all --worker=all --command="$1"
}

state() { # ACTIVE, SUSPENDED, ...; ABSENT if there is no resource
  queued query describe "$GSPAX_NAME" --format='value(state.state)' 2> /dev/null || echo ABSENT
}

wait_until_active() {
  local now before=
  while true; do
    now=$(state)
    [[ $dry_run == 1 ]] && return
    [[ $now == "$before" ]] || echo "$GSPAX_NAME: $now"
    before=$now
    case $now in
      ACTIVE) return ;;
      CREATING | ACCEPTED | WAITING_FOR_RESOURCES | PROVISIONING) sleep 30 ;;
      *)
        echo "gspax: $GSPAX_NAME is $now and will not become active; tpu/resume.sh requests a new one" >&2
        exit 1
        ;;
    esac
  done
}
