#!/usr/bin/env bash
# Starts an experiment as a JobSet: one job per slice, one pod per host. The run directory is in the bucket.
#   tpu/gke/run.sh [--dry-run] [--node-count N] experiments/sort_gspo.py [a.b=c ...]
# The JobSet repeats the command after a preemption. When its restarts are used up, this script resumes the run.

set -euo pipefail
source "$(dirname "$0")/../lib.sh"
read_options "$@"
shift "$used"
need GSPAX_NAME GSPAX_BUCKET GSPAX_RUN GSPAX_IMAGE GSPAX_TPU GSPAX_TOPOLOGY GSPAX_CHIPS GSPAX_RESTARTS
experiment "$@"
hosts=$(count_hosts)
require_integer GSPAX_RESTARTS "$GSPAX_RESTARTS"
tools kubectl

json() { # words as a JSON list of strings
  local word list=
  for word in "$@"; do
    word=${word//\\/\\\\}
    list+="${list:+, }\"${word//\"/\\\"}\""
  done
  echo "[$list]"
}

# A restart cannot fix exit codes 2, invalid input, and 3, a run that diverged. 143 follows a SIGTERM, after a checkpoint.
jobset=$(
  cat << YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $GSPAX_NAME
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: $GSPAX_RESTARTS
    rules:
      - name: badInput
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: $GSPAX_SLICES
      template:
        spec:
          completionMode: Indexed
          parallelism: $hosts
          completions: $hosts
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes: {containerName: gspax, operator: In, values: [2, 3]}
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 600
              serviceAccountName: gspax
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $GSPAX_TPU
                cloud.google.com/gke-tpu-topology: $GSPAX_TOPOLOGY
              containers:
                - name: gspax
                  image: $GSPAX_IMAGE
                  command: $(json gspax train "$1" --workdir "gs://$GSPAX_BUCKET/$GSPAX_RUN" "${@:2}")
                  resources:
                    limits: {google.com/tpu: $GSPAX_CHIPS}
                  env:
                    - {name: GSPAX_SECRET_FILE, value: /secret/secret}
                  volumeMounts:
                    - {name: secret, mountPath: /secret, readOnly: true}
              volumes:
                - name: secret
                  secret: {secretName: $GSPAX_NAME, defaultMode: 256} # 0400
YAML
)
if [[ $dry_run == 1 ]]; then
  echo "$jobset"
else
  mkdir -p "$root/build"
  echo "$jobset" > "$root/build/jobset.yaml"
fi
call kubectl delete jobset "$GSPAX_NAME" --ignore-not-found --cascade=foreground # waits for its checkpoint
call kubectl delete secret "$GSPAX_NAME" --ignore-not-found
call kubectl create secret generic "$GSPAX_NAME" --from-file=secret="$(new_secret)"
call kubectl apply -f "$root/build/jobset.yaml"
