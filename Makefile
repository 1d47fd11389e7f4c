# Everything sets itself up: a virtual environment in .venv, made anew only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 0
DIR ?= runs/quickstart-$(SEED)
INSTALLED := $(VENV)/.installed
PEERS ?= .venv-peers
# OpenMP threads that wait by spinning stand still for each other where other programs want the cores, too: 50 times slower was seen.
export GOMP_SPINCOUNT ?= 1000

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow lint format bench bench-peers mutants clean

help:  ## What there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nemorl needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@

install: $(INSTALLED)  ## The environment alone

quickstart: $(INSTALLED)  ## Teach a small language model to add; about 4 minutes (SEED=1 for another seed)
	$(BIN)/python examples/quickstart.py --seed $(SEED) --dir $(DIR)

test: lint  ## Environment, lint, types and all tests but the slow ones; 5 to 10 minutes
	$(BIN)/python -m pytest -n 2 -m "not slow"

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
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e . -r benchmarks/requirements.txt
	@touch $@

bench-peers: $(PEERS)/.installed  ## The benchmarks against TRL, which gets an environment of its own
	@for script in $(wildcard benchmarks/*_vs_trl.py); do echo "== $$script"; $(PEERS)/bin/python $$script || exit 1; done

mutants: $(INSTALLED)  ## Mutation testing of losses and data; over an hour of one core, resumable (MUTANTS='--sample 300' for a part)
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m tests.mutation.run $(MUTANTS)

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
