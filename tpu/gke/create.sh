#!/usr/bin/env bash
# Creates a GKE cluster with one pool of TPU nodes per slice, the JobSet controller and access to the bucket.
#   tpu/gke/create.sh [--dry-run] [--spot] [--node-count N]
# --spot: the TPU nodes may be preempted. --node-count N: N slices. The settings are in tpu/config.sh.

set -euo pipefail
source "$(dirname "$0")/../lib.sh"
read_options "$@"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME GSPAX_BUCKET GSPAX_MACHINE GSPAX_TOPOLOGY GSPAX_CHIPS
hosts=$(count_hosts)
tools gcloud kubectl

call gcloud container clusters create "$GSPAX_NAME" --project="$GSPAX_PROJECT" --location="$GSPAX_ZONE" \
  --num-nodes=1 --machine-type=e2-standard-8 --workload-pool="$GSPAX_PROJECT.svc.id.goog"
for ((slice = 0; slice < GSPAX_SLICES; slice++)); do
  pool=(create "slice-$slice" --cluster="$GSPAX_NAME" --project="$GSPAX_PROJECT" --location="$GSPAX_ZONE"
    --machine-type="$GSPAX_MACHINE" --tpu-topology="$GSPAX_TOPOLOGY" --num-nodes="$hosts")
  [[ $GSPAX_SPOT == 1 ]] && pool+=(--spot)
  call gcloud container node-pools "${pool[@]}"
done
call gcloud container clusters get-credentials "$GSPAX_NAME" --project="$GSPAX_PROJECT" --location="$GSPAX_ZONE"
call kubectl apply --server-side \
  -f https://github.com/kubernetes-sigs/jobset/releases/download/v0.11.1/manifests.yaml
call kubectl wait --for=condition=Available deployment/jobset-controller-manager -n jobset-system --timeout=300s
call kubectl create serviceaccount gspax

number=$(query gcloud projects describe "$GSPAX_PROJECT" --format='value(projectNumber)')
pods="principal://iam.googleapis.com/projects/${number:-NUMBER}/locations/global/workloadIdentityPools"
call gcloud storage buckets add-iam-policy-binding "gs://$GSPAX_BUCKET" --role=roles/storage.objectUser \
  --member="$pods/$GSPAX_PROJECT.svc.id.goog/subject/ns/default/sa/gspax"
