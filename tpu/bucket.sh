#!/usr/bin/env bash
# Makes the bucket that run directories lie in, once, for TPU VMs and for GKE.
#   tpu/bucket.sh [--dry-run]
# Its hierarchical namespace makes renaming a folder one step, which is how a checkpoint is finished.

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_BUCKET
tools gcloud

call gcloud storage buckets create "gs://$GSPAX_BUCKET" --project="$GSPAX_PROJECT" --location="${GSPAX_ZONE%-*}" \
  --uniform-bucket-level-access --enable-hierarchical-namespace
