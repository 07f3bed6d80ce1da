#!/usr/bin/env bash
# Runs on a TPU VM, called by tpu/run.sh: starts `gspax train` as the systemd unit `gspax`, output in ~/gspax.log.
#   tpu/host/run.sh WORKDIR FILE [a.b=c ...]
# A preemption shuts the VM down, and systemd sends SIGTERM to the unit: gspax saves a checkpoint and exits with 143.
# The exit code decides what follows. 1, a failure such as the death of another host's process, or a kill: systemd
# starts the same command again, which resumes. 2, invalid input, and 3, a run that diverged: it does not. 129, 130, 143:
# ended by a signal after a save.

set -euo pipefail
workdir=$1 file=$2
shift 2

if [[ $(systemctl is-active gspax || true) =~ ^(active|activating|deactivating)$ ]]; then # activating: to be restarted
  echo "gspax: a run is already active here"
  exit 0
fi
sudo systemctl reset-failed gspax 2> /dev/null || true
sudo systemd-run --quiet --unit=gspax --uid="$(id -u)" --gid="$(id -g)" \
  --working-directory="$HOME/gspax" --setenv=HOME="$HOME" --setenv=PYTHONUNBUFFERED=1 \
  --setenv=GSPAX_SECRET_FILE="$HOME/gspax.secret" \
  --property=EnvironmentFile="-$HOME/gspax.env" \
  --property=After=network-online.target \
  --property=KillMode=mixed --property=KillSignal=SIGTERM --property=TimeoutStopSec=600 \
  --property=SuccessExitStatus="129 130 143" \
  --property=Restart=on-failure --property=RestartPreventExitStatus="2 3" --property=RestartSec=15 \
  --property=StartLimitIntervalSec=3600 --property=StartLimitBurst=20 \
  --property=StandardOutput="append:$HOME/gspax.log" --property=StandardError="append:$HOME/gspax.log" -- \
  "$HOME/gspax/.venv/bin/gspax" train "$file" --workdir "$workdir" "$@"
