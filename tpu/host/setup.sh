#!/usr/bin/env bash
# Runs on a TPU VM, called by tpu/setup.sh: installs gspax in ~/gspax/.venv, with what the experiments need.

set -euo pipefail
cd "$HOME/gspax"

python3 -m pip install --quiet --user uv # the images' Python is too old; uv installs another
export PATH="$HOME/.local/bin:$PATH"
uv venv --quiet --python 3.12 .venv
uv pip install --quiet --python .venv/bin/python --constraint requirements.txt --editable '.[train,rewards,tpu]'

if ! command -v bwrap > /dev/null; then # the sandbox of rewards.code
  { sudo apt-get update -qq && sudo apt-get install -qq --yes bubblewrap; } ||
    echo "gspax: bubblewrap could not be installed: experiments that run programs of the model will be refused" >&2
fi
