#!/usr/bin/env bash
# Prints the state of the queued resource and, if it is active, follows the output of the first host until Ctrl-C.
#   tpu/watch.sh [--dry-run]

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME
tools gcloud

now=$(state)
[[ $dry_run == 1 ]] || echo "$GSPAX_NAME: $now"
if [[ $dry_run == 1 || $now == ACTIVE ]]; then
  queued call ssh "$GSPAX_NAME" --node=0 --worker=0 --command='systemctl is-active gspax; tail -n 50 -F gspax.log'
fi
