# `make train` learns to sort digits in a few minutes on a CPU; `make test` runs every check. Both work on a bare
# checkout: they make .venv first, and again whenever what it is made from has changed. A test file stays on one worker,
# where its tests share what they compile.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
TORCH := $(VENV)/torch
TPU := $(VENV)/tpu

.PHONY: train test clean

train: $(INSTALLED)
	$(BIN)/gspax train experiments/sort_gspo.py --workdir runs/sort_gspo

test: $(INSTALLED) $(TORCH) $(TPU)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
	find src tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +

# Not a failure where there is none: the tests that need it then skip, and each has one beside it that does not.
$(TORCH): $(INSTALLED) requirements-torch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-torch.txt || echo "No CPU build of torch at hand (see requirements-torch.txt): tests beside transformers' models are skipped."
	@touch $@

# Not a failure either: it compiles for TPUs without one, but exists for Linux on x86-64 only. 213 MB, some 15 seconds.
$(TPU): $(INSTALLED) requirements-tpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-tpu.txt || echo "No libtpu at hand (see requirements-tpu.txt): tests that compile for a TPU are skipped."
	@touch $@

$(INSTALLED): requirements.txt setup.cfg
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or run make PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but gspax needs 3.11 or newer: run make PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
