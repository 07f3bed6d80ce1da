#!/usr/bin/env bash
# Starts an experiment on all hosts; it keeps running after a disconnect. The run directory is in the bucket.
#   tpu/run.sh [--dry-run] experiments/sort_gspo.py [a.b=c ...]
# A host that already runs one is left alone. The same command resumes a run from its newest checkpoint.

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
shift "$used"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME GSPAX_BUCKET GSPAX_RUN
experiment "$@"
tools gcloud

on_hosts "bash gspax/tpu/host/run.sh$(printf ' %q' "gs://$GSPAX_BUCKET/$GSPAX_RUN" "$@")"
