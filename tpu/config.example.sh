# shellcheck shell=bash
# Settings of the scripts in this folder. Copy to tpu/config.sh (which git ignores), or set the same variables in the
# environment, which overrides the file. See docs/tpu.md.

: "${GSPAX_PROJECT:=my-project}"
: "${GSPAX_ZONE:=us-west4-a}"
: "${GSPAX_NAME:=gspax}" # the name of the queued resource, or of the cluster and its JobSet
: "${GSPAX_BUCKET:=my-bucket}" # for run directories; without gs://
: "${GSPAX_RUN:=sort}" # the run directory in the bucket
: "${GSPAX_SLICES:=1}"
: "${GSPAX_SPOT:=0}" # 1: cheaper, may be preempted at any time

# TPU VMs
: "${GSPAX_ACCELERATOR:=v5litepod-16}"
: "${GSPAX_RUNTIME:=v2-alpha-tpuv5-lite}" # v5p: v2-alpha-tpuv5, v6e: v2-alpha-tpuv6e

# GKE
: "${GSPAX_IMAGE:=us-west4-docker.pkg.dev/my-project/gspax/gspax:latest}"
: "${GSPAX_MACHINE:=ct5lp-hightpu-4t}" # the machine type of a host
: "${GSPAX_TPU:=tpu-v5-lite-podslice}" # v5p: tpu-v5p-slice, v6e: tpu-v6e-slice
: "${GSPAX_TOPOLOGY:=4x4}" # the chips of a slice
: "${GSPAX_CHIPS:=4}" # the number of chips of a host
: "${GSPAX_RESTARTS:=20}" # restarts of the JobSet before it counts as failed
