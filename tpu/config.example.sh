# shellcheck shell=bash
# The settings of the scripts here. Copy to tpu/config.sh (git ignores that file), or set the same variables in the
# environment, which wins. docs/tpu.md explains.

: "${GSPAX_PROJECT:=my-project}"
: "${GSPAX_ZONE:=us-west4-a}"
: "${GSPAX_NAME:=gspax}" # of the queued resource, or of the cluster and its job
: "${GSPAX_BUCKET:=my-bucket}" # run directories lie in it; without gs://
: "${GSPAX_RUN:=sort}" # the run directory in the bucket
: "${GSPAX_SLICES:=1}"
: "${GSPAX_SPOT:=0}" # 1: cheaper, can be taken away at any time

# TPU VMs
: "${GSPAX_ACCELERATOR:=v5litepod-16}"
: "${GSPAX_RUNTIME:=v2-alpha-tpuv5-lite}" # v5p: v2-alpha-tpuv5, v6e: v2-alpha-tpuv6e

# GKE
: "${GSPAX_IMAGE:=us-west4-docker.pkg.dev/my-project/gspax/gspax:latest}"
: "${GSPAX_MACHINE:=ct5lp-hightpu-4t}" # of a host
: "${GSPAX_TPU:=tpu-v5-lite-podslice}" # v5p: tpu-v5p-slice, v6e: tpu-v6e-slice
: "${GSPAX_TOPOLOGY:=4x4}" # chips of a slice
: "${GSPAX_CHIPS:=4}" # chips of a host
: "${GSPAX_RESTARTS:=20}" # how often a job may start again before it counts as failed
