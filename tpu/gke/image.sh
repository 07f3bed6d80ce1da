#!/usr/bin/env bash
# Builds the image of the pods from this checkout, and pushes it.
#   tpu/gke/image.sh [--dry-run]

set -euo pipefail
source "$(dirname "$0")/../lib.sh"
read_options "$@"
need GSPAX_IMAGE
tools docker

call docker build --platform=linux/amd64 --file="$root/docker/tpu.Dockerfile" --tag="$GSPAX_IMAGE" "$root"
call docker push "$GSPAX_IMAGE"
