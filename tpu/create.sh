#!/usr/bin/env bash
# Requests TPU VMs as a queued resource and waits until it is active.
#   tpu/create.sh [--dry-run] [--spot] [--node-count N]
# --spot: may be preempted. --node-count N: N slices (multislice). The settings are in tpu/config.sh.

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME GSPAX_ACCELERATOR GSPAX_RUNTIME
tools gcloud

request=(create "$GSPAX_NAME" --accelerator-type="$GSPAX_ACCELERATOR" --runtime-version="$GSPAX_RUNTIME"
  --scopes=https://www.googleapis.com/auth/cloud-platform)
if [[ $GSPAX_SLICES -gt 1 ]]; then
  request+=(--node-count="$GSPAX_SLICES" --node-prefix="$GSPAX_NAME")
else
  request+=(--node-id="$GSPAX_NAME")
fi
[[ $GSPAX_SPOT == 1 ]] && request+=(--spot)
queued call "${request[@]}"
wait_until_active
