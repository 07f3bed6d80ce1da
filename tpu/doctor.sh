#!/usr/bin/env bash
# Checks on all hosts that the slice computes correctly, and measures how fast: `gspax doctor`, with its files in the bucket.
#   tpu/doctor.sh [--dry-run]
# Run it after tpu/setup.sh, and not while a run is active: a TPU belongs to one process.

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME GSPAX_BUCKET
tools gcloud

on_hosts "if [[ \$(systemctl is-active gspax) =~ ^(active|activating|deactivating)\$ ]]; then echo 'gspax: a run is active here' >&2; exit 1; fi; \
cd gspax && .venv/bin/gspax doctor --workdir $(printf '%q' "gs://$GSPAX_BUCKET/doctor") --secret-file ~/gspax.secret"
