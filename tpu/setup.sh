#!/usr/bin/env bash
# Copies the last commit of this checkout and a new secret to all hosts, and installs gspax there. If there is a file
# tpu/gspax.env with lines NAME=value, such as HF_TOKEN or WANDB_API_KEY, runs have these variables.
#   tpu/setup.sh [--dry-run]
# Refused while a run is active.

set -euo pipefail
source "$(dirname "$0")/lib.sh"
read_options "$@"
need GSPAX_PROJECT GSPAX_ZONE GSPAX_NAME
tools gcloud git

bundle=$root/build/gspax.bundle
if [[ $dry_run != 1 ]]; then
  mkdir -p "$root/build"
  git -C "$root" bundle create --quiet "$bundle" HEAD
  [[ -z $(git -C "$root" status --porcelain) ]] || echo "gspax: uncommitted changes are not sent" >&2
fi
files=("$bundle" "$(new_secret)")
[[ -f $tpu/gspax.env ]] && files+=("$tpu/gspax.env")
queued call scp "${files[@]}" "$GSPAX_NAME:" --node=all --worker=all
on_hosts "chmod -f 600 gspax.secret gspax.env || true; if [[ \$(systemctl is-active gspax) =~ ^(active|activating|deactivating)\$ ]]; then echo 'gspax: a run is active here' >&2; exit 1; fi; \
rm -rf gspax && git clone --quiet --config advice.detachedHead=false gspax.bundle gspax && bash gspax/tpu/host/setup.sh"
