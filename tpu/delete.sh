#!/usr/bin/env bash
# Stops the run on all hosts, which saves a checkpoint, and deletes the TPUs. The bucket is kept.
#   tpu/delete.sh [--dry-run]

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME
tools gcloud

now=$(state)
if [[ $dry_run == 1 || $now == ACTIVE ]]; then
  on_hosts 'sudo systemctl stop gspax 2> /dev/null || true' || echo "gspax: the run could not be stopped before deleting" >&2
fi
queued call delete "$GSPAX_NAME" --force --quiet
