# Everything a person or CI runs here is a target of this file; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3.11
PORT ?= 8000
HOST ?= 127.0.0.1
MODEL ?= models/miniature/checkpoint
PROFILE ?= docker/profiles/miniature-cpu.yaml
# More arguments: for `vllm serve` (serve), pytest (test, test-full) or the script a target runs.
ARGS ?=

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -c plugin/pyproject.toml --rootdir . plugin/tests models/tests
CODE := plugin models

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: serve
serve: env ## serve the miniature V4 on port 8000 (PORT=, HOST=, MODEL=, PROFILE=, ARGS='--tensor-parallel-size 2')
	@$(BIN)/assay-kernels serve $(MODEL) --config $(PROFILE) --host $(HOST) --port $(PORT) -- $(ARGS)

.PHONY: test
test: lint ## lint, unit tests and end-to-end tests: no root, no Docker, at most 25 minutes on two cores
	@$(PYTEST) -m "not slow" $(ARGS)

.PHONY: test-full
test-full: lint ## the same and the slow tests: broken checkpoints served, every fault made visible
	@$(PYTEST) $(ARGS)
	@$(MAKE) test-gpu-compile MARK=

.PHONY: test-gpu-compile
test-gpu-compile: MARK = -m "not slow"
test-gpu-compile: ## compile Hopper kernels without a GPU and read their machine code (own environment, .venv-gpu)
	@lock=plugin/requirements/gpu-compile.lock; cmp -s $$lock .venv-gpu/lock || { \
	rm -rf .venv-gpu && "$(PYTHON)" -m venv .venv-gpu && \
	.venv-gpu/bin/pip install --quiet --require-hashes --no-deps -r $$lock && cp $$lock .venv-gpu/lock; }
	@PYTHONPATH=plugin/src .venv-gpu/bin/python -m pytest -c plugin/pyproject.toml --rootdir . \
	plugin/tests/sm90/test_compile.py $(MARK) $(ARGS)

.PHONY: bench-h200
bench-h200: ## time the Hopper kernels beside their peers on this GPU (needs the CUDA image; GPU_PYTHON=, ARGS=)
	@PYTHONPATH=plugin/src $(or $(GPU_PYTHON),python3) plugin/benchmarks/h200.py $(ARGS)

.PHONY: test-avx2
test-avx2: env ## the miniature under an emulated CPU that has AVX2 and nothing newer (needs qemu-user)
	@PYTHON="$(CURDIR)/$(BIN)/python" plugin/tests/avx2/run.sh $(MODEL)

.PHONY: lint
lint: env ## ruff (check and format) on everything, mypy --strict on the plugin
	@$(BIN)/ruff check --quiet --config plugin/pyproject.toml $(CODE)
	@$(BIN)/ruff format --quiet --check --config plugin/pyproject.toml $(CODE)
	@$(BIN)/mypy --config-file plugin/pyproject.toml plugin/src
	@echo "lint: ruff and mypy have nothing to say"

.PHONY: format
format: env ## let ruff lay out the code and repair what it can
	@$(BIN)/ruff check --quiet --fix --config plugin/pyproject.toml $(CODE)
	@$(BIN)/ruff format --quiet --config plugin/pyproject.toml $(CODE)

.PHONY: agreement
agreement: env ## KL and top-1 agreement of vLLM + plugin with transformers, dialects A, B and C
	@$(BIN)/python plugin/benchmarks/agreement.py $(ARGS)

.PHONY: bench
bench: env ## tokens/s of the NVFP4 miniature beside its bf16 original, at concurrency 1, 8 and 16
	@$(BIN)/python plugin/benchmarks/throughput.py $(ARGS)

.PHONY: bench-checkpoint
bench-checkpoint: env ## audit and convert beside cat and cp of the same bytes (about 20 GB of disk, --scratch DIR)
	@$(BIN)/python plugin/benchmarks/checkpoint_tools.py $(ARGS)

.PHONY: battery
battery: env ## ask a server that `make serve` started the miniature's battery of questions
	@$(BIN)/python models/miniature/battery.py run --url http://$(HOST):$(PORT) $(ARGS)

.PHONY: env
env: ## .venv from the pinned, hashed locks; returns at once when it is up to date (WHEELHOUSE=, PYTHON=)
	@command -v "$(PYTHON)" >/dev/null || { echo "env: $(PYTHON) was not found; on Debian 12: sudo apt-get install python3.11 python3.11-venv; elsewhere: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" plugin/requirements/env.py

.PHONY: lock
lock: ## remake the locks from cpu.in and dev.in (ARGS=--upgrade for newer versions); needs the package index
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	"$(PYTHON)" -m venv "$$folder"; \
	"$$folder/bin/pip" install --quiet uv==0.13.9 packaging==26.4; \
	"$$folder/bin/python" plugin/requirements/lock.py $(ARGS)

.PHONY: clean
clean: ## remove what the targets above made, .venv included
	@rm -rf .venv .venv-gpu .assay .mypy_cache .ruff_cache .pytest_cache .hypothesis plugin/src/*.egg-info plugin/build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
