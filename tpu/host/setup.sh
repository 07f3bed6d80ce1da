#!/usr/bin/env bash
# Runs on a TPU VM, called by tpu/setup.sh: installs gspax in ~/gspax/.venv and mounts the bucket at ~/bucket.
#   tpu/host/setup.sh BUCKET

set -euo pipefail
bucket=$1
cd "$HOME/gspax"

python3 -m pip install --quiet --user uv # the images' Python is too old; uv installs another
export PATH="$HOME/.local/bin:$PATH"
uv venv --quiet --python 3.12 .venv
uv pip install --quiet --python .venv/bin/python --constraint requirements.txt --editable '.[train,tpu]'

if ! command -v gcsfuse > /dev/null; then
  source=https://packages.cloud.google.com/apt
  key=/usr/share/keyrings/cloud.google.asc
  curl -fsS "$source/doc/apt-key.gpg" | sudo tee "$key" > /dev/null
  echo "deb [signed-by=$key] $source gcsfuse-$(lsb_release -cs) main" | sudo tee /etc/apt/sources.list.d/gcsfuse.list
  sudo apt-get update -qq
  sudo apt-get install -qq -y gcsfuse
fi

# A separate unit, so that a shutdown ends the run first, then the mount, then the network. The hosts see each other's
# files at once only without a metadata cache.
if ! mountpoint -q "$HOME/bucket"; then
  mkdir -p "$HOME/bucket"
  sudo systemctl reset-failed gspax-bucket 2> /dev/null || true
  sudo systemd-run --quiet --unit=gspax-bucket --uid="$(id -u)" --gid="$(id -g)" \
    --property=After=network-online.target -- \
    "$(command -v gcsfuse)" --foreground --implicit-dirs --metadata-cache-ttl-secs=0 "$bucket" "$HOME/bucket"
  for _ in {1..60}; do
    mountpoint -q "$HOME/bucket" && break
    sleep 1
  done
  if ! mountpoint -q "$HOME/bucket"; then
    echo "gspax: gs://$bucket could not be mounted (see journalctl -u gspax-bucket)" >&2
    exit 1
  fi
fi
