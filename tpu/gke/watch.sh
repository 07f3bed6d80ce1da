#!/usr/bin/env bash
# Prints the JobSet and its pods, and follows the output of the first host until Ctrl-C.
#   tpu/gke/watch.sh [--dry-run]

set -euo pipefail
source "$(dirname "$0")/../lib.sh"
read_options "$@"
need GSPAX_NAME
tools kubectl

ours=jobset.sigs.k8s.io/jobset-name=$GSPAX_NAME
first=jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0
call kubectl get jobset "$GSPAX_NAME"
call kubectl get pods --selector="$ours"
call kubectl logs --selector="$ours,$first" --container=gspax --tail=50 --follow
