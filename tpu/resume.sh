#!/usr/bin/env bash
# Resumes a run after a preemption: requests the TPUs again if they are gone, sets them up and repeats the command.
#   tpu/resume.sh [--dry-run] [--spot] [--node-count N] experiments/sort_gspo.py [a.b=c ...]
# Takes the arguments of create.sh and run.sh. If the TPUs still exist, it does what run.sh does.

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
shift "$used"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME GSPAX_ACCELERATOR GSPAX_RUNTIME GSPAX_BUCKET GSPAX_RUN
experiment "$@"
tools gcloud git

now=$(state)
if [[ $now != ACTIVE ]]; then
  case $now in
    ABSENT) "$tpu/create.sh" ;;
    CREATING | ACCEPTED | WAITING_FOR_RESOURCES | PROVISIONING) wait_until_active ;;
    *) # SUSPENDED after a preemption; a dry run shows this
      queued call delete "$GSPAX_NAME" --force --quiet
      "$tpu/create.sh"
      ;;
  esac
  "$tpu/setup.sh"
fi
"$tpu/run.sh" "$@"
