#!/usr/bin/env bash
# Starts an experiment on all hosts; it goes on when the connection ends. The run directory is in the bucket.
#   tpu/run.sh [--dry-run] experiments/sort_gspo.py [a.b=c ...]
# A host that already runs one is left alone. The same command continues a run from its last checkpoint.

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
shift "$used"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME GSPAX_RUN
experiment "$@"
tools gcloud

on_hosts "bash gspax/tpu/host/run.sh$(printf ' %q' "$GSPAX_RUN" "$@")"
