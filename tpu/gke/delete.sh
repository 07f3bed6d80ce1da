#!/usr/bin/env bash
# Stops the run, which saves a checkpoint, and deletes the cluster with its TPU nodes. The bucket and the image are kept.
#   tpu/gke/delete.sh [--dry-run]

set -euo pipefail
source "$(dirname "$0")/../lib.sh"
read_options "$@"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME
tools gcloud kubectl

call kubectl delete jobset "$GSPAX_NAME" --ignore-not-found --cascade=foreground
call gcloud container clusters delete "$GSPAX_NAME" --project="$GSPAX_PROJECT" --location="$GSPAX_ZONE" --quiet
