# Needs Python 3.11 or newer, make and a package index. Everything is installed into $(VENV) of this folder.
#
#   make swarm                    install, then a real swarm of six nodes on this machine, about four minutes
#   make test | check | bench     the tests; format, lint, types and import rules; every bench, briefly
#   make bounds                   whether the oldest and the newest dependencies that pyproject.toml allows work
#
# TORCH_INDEX=URL takes PyTorch from there: PyTorch's index for CPUs is https://download.pytorch.org/whl/cpu and saves gigabytes of CUDA.
# ARGS="…" is handed on: make swarm ARGS="--minutes 2", make test ARGS="-k packaging".

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help swarm test check format bench bounds docs install dev clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

swarm: install
	$(BIN)/blocktrain-sim local $(ARGS)

test: dev
	$(BIN)/python -m pytest $(ARGS)

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: dev
	$(BIN)/blocktrain-sim bench all --brief $(ARGS)

bounds: $(VENV)/.python
	$(BIN)/python .ci/bounds.py oldest
	$(BIN)/python .ci/bounds.py newest

docs: dev
	$(BIN)/python docs/generate.py

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Stamps: installing again costs nothing until what is to be installed changes. An editable install follows the sources by itself.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "blocktrain needs Python 3.11 or newer; say which with: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: constraints.txt | $(VENV)/.python
	@echo "installing PyTorch into $(VENV) (a large download the first time)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),) torch
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@echo "installing blocktrain into $(VENV)"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the tools for tests and checks into $(VENV)"
	$(PIP) -e '.[dev]'
	@touch $@
