#!/usr/bin/env bash
# Runs on a TPU VM, called by tpu/run.sh: starts `gspax train` as the systemd unit `gspax`, output in ~/gspax.log.
#   tpu/host/run.sh RUN FILE [a.b=c ...]
# A preemption shuts the VM down, and systemd sends SIGTERM to the unit: gspax saves a checkpoint and exits with 143.

set -euo pipefail
run=$1 file=$2
shift 2

if systemctl is-active --quiet gspax; then
  echo "gspax: a run is already active here"
  exit 0
fi
sudo systemctl reset-failed gspax 2> /dev/null || true
sudo systemd-run --quiet --unit=gspax --uid="$(id -u)" --gid="$(id -g)" \
  --working-directory="$HOME/gspax" --setenv=HOME="$HOME" --setenv=PYTHONUNBUFFERED=1 \
  --property=Requires=gspax-bucket.service --property=After=gspax-bucket.service \
  --property=KillMode=mixed --property=KillSignal=SIGTERM --property=TimeoutStopSec=600 \
  --property=SuccessExitStatus=143 \
  --property=StandardOutput="append:$HOME/gspax.log" --property=StandardError="append:$HOME/gspax.log" -- \
  "$HOME/gspax/.venv/bin/gspax" train "$file" --workdir "$HOME/bucket/$run" "$@"
