#!/usr/bin/env bash
# Creates the bucket for run directories, once, for TPU VMs and for GKE.
#   tpu/bucket.sh [--dry-run]

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_BUCKET
tools gcloud

call gcloud storage buckets create "gs://$GSPAX_BUCKET" --project="$GSPAX_PROJECT" --location="${GSPAX_ZONE%-*}" \
  --uniform-bucket-level-access --soft-delete-duration=0 # else deleted checkpoints are paid for, for a week
