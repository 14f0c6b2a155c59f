SHELL := /bin/bash
VENV ?= .venv
export VENV
T1 := $(VENV)/bin/t1
PYTEST := $(VENV)/bin/python -m pytest

.PHONY: help setup quickstart learn learn-table gap test test-fast lint clean

help:
	@echo "make setup       environment in $(VENV): torch (CPU), vLLM (CPU), Megatron-Core, this package"
	@echo "make quickstart  tasks, SFT, critic warm-up and 3 PPO iterations on two CPU cores, with evaluation"
	@echo "make learn       a longer training: SEED=0, reward=dense or reward=binary"
	@echo "make learn-table what the finished runs of make learn came to"
	@echo "make gap         log-prob gap between sampler and trainer, fp32 and bf16, with and without replay"
	@echo "make test        all tests (real vLLM, Megatron over two processes, Slurm where installed)"
	@echo "make test-fast   only the fast ones (under 3 minutes)"
	@echo "make lint        ruff"

setup:
	@scripts/setup_cpu.sh

quickstart: setup
	@scripts/quickstart.sh $(VENV)

SEED ?= 0
reward ?= dense
learn: setup
	@scripts/learn.sh $(VENV) $(SEED) $(reward)

learn-table: setup
	@$(VENV)/bin/python benchmarks/learning.py

gap: setup
	@$(VENV)/bin/t1 tasks generate experiment=quickstart
	@$(VENV)/bin/python benchmarks/gap.py

test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m "not slow and not gpu"

lint: setup
	$(VENV)/bin/ruff check megatron_t1 tests benchmarks
	$(VENV)/bin/ruff format --check megatron_t1 tests benchmarks

clean:
	rm -rf runs tasks outputs multirun dist .pytest_cache .hypothesis .ruff_cache
