# Everything a person or CI runs here is a target of this file; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3.11
PORT ?= 8000
HOST ?= 127.0.0.1
MODEL ?= models/miniature/checkpoint
PROFILE ?= docker/profiles/miniature-cpu.yaml
POLICY ?= miniature
BASELINE ?= .assay/baseline.json
WORKLOAD ?= chat
SCALE ?= miniature
OUT ?= .assay/load
SUITE ?= miniature
TIER ?= default
# More arguments: for `vllm serve` (serve), pytest (test, test-full) or the script a target runs.
ARGS ?=

VARIANT ?= cu130

BIN := .venv/bin
# The light packages (battery, load tests, gate) alone, without torch or vLLM: what the gate image has.
GATE_BIN := .venv-gate/bin
# ARGS of `make test` may name tests that are not here.
LOAD_ARGS ?=
GATE_PYTEST := $(GATE_BIN)/python -m pytest -c loadtest/pyproject.toml --rootdir . loadtest/tests
PYTEST := $(BIN)/python -m pytest -c plugin/pyproject.toml --rootdir .
# Tests that start servers want the machine for themselves; the others run two at a time.
SERVING_TESTS := plugin/tests/launcher plugin/tests/e2e plugin/tests/faults
OTHER_TESTS := $(filter-out $(SERVING_TESTS) plugin/tests/avx2 plugin/tests/__pycache__,$(patsubst %/,%,$(wildcard plugin/tests/*/))) smoke_tests/tests models/tests
# pytest exits with 5 where ARGS has chosen no test of a part.
NONE_CHOSEN = || { [ $$? = 5 ] && [ -n "$(ARGS)" ]; }
# Of the containers, what needs no daemon.
CONTAINER_FILES := $(BIN)/python -m pytest -c plugin/pyproject.toml --rootdir . docker/tests/test_0_files.py
CODE := plugin smoke_tests models loadtest docker k8s

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: serve
serve: env ## serve the miniature V4 on port 8000 (PORT=, HOST=, MODEL=, PROFILE=, ARGS='--tensor-parallel-size 2')
	@$(BIN)/assay-kernels serve $(MODEL) --config $(PROFILE) --host $(HOST) --port $(PORT) -- $(ARGS)

.PHONY: test
test: lint ## lint, unit tests and end-to-end tests: no root, no Docker, at most 25 minutes on two cores
	@OMP_NUM_THREADS=1 $(PYTEST) $(OTHER_TESTS) -n 2 --dist loadfile -m "not slow" $(ARGS) $(NONE_CHOSEN)
	@$(PYTEST) $(SERVING_TESTS) -m "not slow" $(ARGS) $(NONE_CHOSEN)
	@$(CONTAINER_FILES)
	@$(MAKE) test-load

.PHONY: test-full
test-full: lint ## the same and the slow tests: broken checkpoints served, every fault made visible
	@OMP_NUM_THREADS=1 $(PYTEST) $(OTHER_TESTS) -n 2 --dist loadfile $(ARGS) $(NONE_CHOSEN)
	@$(PYTEST) $(SERVING_TESTS) $(ARGS) $(NONE_CHOSEN)
	@$(CONTAINER_FILES)
	@$(GATE_PYTEST)
	@PYTHON=$(BIN)/python docker/tests/run.sh -m slow
	@$(MAKE) test-gpu-compile MARK=

.PHONY: test-load
test-load: env-gate ## tests of the load generator and the gate alone: no vLLM, at most 3 minutes
	@$(GATE_PYTEST) -m "not slow" $(LOAD_ARGS)

.PHONY: test-containers
test-containers: env ## build the laptop stack's images from this commit, test real containers (root, or a daemon)
	@PYTHON=$(BIN)/python docker/tests/run.sh -m "not slow" $(ARGS)

.PHONY: images
images: env ## build the CPU and gate images; sizes and build times, cold and warm
	@PYTHON=$(BIN)/python docker/tests/run.sh --build-only

.PHONY: image-cuda
image-cuda: ## build the CUDA image (about 4.6 GB to fetch, VARIANT=cu130, BASE_IMAGE=)
	@DOCKER_BUILDKIT=1 docker build -f docker/Dockerfile -t assay-cuda:local --build-arg VARIANT=$(VARIANT) \
		--build-arg REVISION=$$(git rev-parse HEAD) $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) $(ARGS) .

.PHONY: lint-containers
lint-containers: ## hadolint, the compose schema and the shell scripts, as far as these tools are installed
	@docker/tests/lint.sh

.PHONY: test-gpu-compile
test-gpu-compile: MARK = -m "not slow"
test-gpu-compile: ## compile Hopper and Blackwell kernels without a GPU and read their machine code (own environment, .venv-gpu)
	@lock=plugin/requirements/gpu-compile.lock; cmp -s $$lock .venv-gpu/lock || { \
	rm -rf .venv-gpu && "$(PYTHON)" -m venv .venv-gpu && \
	.venv-gpu/bin/pip install --quiet --require-hashes --no-deps -r $$lock && cp $$lock .venv-gpu/lock; }
	@PYTHONPATH=plugin/src .venv-gpu/bin/python -m pytest -c plugin/pyproject.toml --rootdir . \
	plugin/tests/sm90/test_compile.py plugin/tests/sm100/test_compile.py \
	plugin/tests/sm100/test_device_layout.py $(MARK) $(ARGS)

.PHONY: bench-h200
bench-h200: ## time the Hopper kernels beside their peers on this GPU (needs the CUDA image; GPU_PYTHON=, ARGS=)
	@PYTHONPATH=plugin/src $(or $(GPU_PYTHON),python3) plugin/benchmarks/h200.py $(ARGS)

.PHONY: e2e-h200
e2e-h200: ## vLLM with the plugin on this H200: coherent? how fast beside Humming and Marlin? (CUDA image; GPU_PYTHON=, ARGS='--phase miniature')
	@PYTHONPATH=plugin/src $(or $(GPU_PYTHON),python3) plugin/benchmarks/e2e_h200.py $(ARGS)

.PHONY: test-avx2
test-avx2: env ## the miniature under an emulated CPU that has AVX2 and nothing newer (needs qemu-user)
	@PYTHON="$(CURDIR)/$(BIN)/python" plugin/tests/avx2/run.sh $(MODEL)

.PHONY: lint
lint: env env-gate ## ruff (check and format) on everything, mypy --strict on the packages
	@$(BIN)/ruff check --quiet --config plugin/pyproject.toml $(CODE)
	@$(BIN)/ruff format --quiet --check --config plugin/pyproject.toml $(CODE)
	@$(BIN)/mypy --config-file plugin/pyproject.toml plugin/src smoke_tests/src
	@$(GATE_BIN)/mypy --config-file loadtest/pyproject.toml loadtest/src
	@echo "lint: ruff and mypy have nothing to say"

.PHONY: format
format: env ## let ruff lay out the code and repair what it can
	@$(BIN)/ruff check --quiet --fix --config plugin/pyproject.toml $(CODE)
	@$(BIN)/ruff format --quiet --config plugin/pyproject.toml $(CODE)

K8S := .cache/k8s

.PHONY: k8s-tools
k8s-tools: ## helm 3 and 4, kubectl, promtool and a Python environment into .cache/k8s, pinned and hashed
	@command -v "$(PYTHON)" >/dev/null || { echo "k8s-tools: $(PYTHON) was not found (make PYTHON=...)" >&2; exit 1; }
	@"$(PYTHON)" k8s/tests/tools.py >/dev/null

.PHONY: test-k8s
test-k8s: k8s-tools ## the chart, base, rules and dashboards: no cluster, no Docker, at most 5 minutes on two cores
	@$(K8S)/venv/bin/python -B -m pytest -c k8s/tests/pytest.ini --rootdir k8s/tests -p no:cacheprovider -n 2 -q k8s/tests $(ARGS)

.PHONY: test-pod
test-pod: env k8s-tools ## the chart's miniature pod, rendered and run on an engine: probes, Prometheus, faults (root, or a daemon)
	@PYTHON=$(BIN)/python docker/tests/run.sh --pod $(ARGS)

.PHONY: pod-pictures
pod-pictures: env k8s-tools ## the same, and the dashboards drawn from its Prometheus into docs/img
	@ASSAY_PICTURES=$(CURDIR)/docs/img PYTHON=$(BIN)/python docker/tests/run.sh --pod -k "ready or monitoring" $(ARGS)

.PHONY: k8s-generate
k8s-generate: k8s-tools ## remake base, rules, schema, dashboards and tables after a change of the chart
	@HELM=$(K8S)/bin/helm4 $(K8S)/venv/bin/python -B k8s/generate

.PHONY: agreement
agreement: env ## KL and top-1 agreement of vLLM + plugin with transformers, dialects A, B and C
	@$(BIN)/python plugin/benchmarks/agreement.py $(ARGS)

.PHONY: bench
bench: env ## tokens/s of the NVFP4 miniature beside its bf16 original, at concurrency 1, 8 and 16
	@$(BIN)/python plugin/benchmarks/throughput.py $(ARGS)

.PHONY: bench-checkpoint
bench-checkpoint: env ## audit and convert beside cat and cp of the same bytes (about 20 GB of disk, --scratch DIR)
	@$(BIN)/python plugin/benchmarks/checkpoint_tools.py $(ARGS)

.PHONY: smoke
smoke: env ## is the server that `make serve` started coherent? exit 0 yes, 1 no, 2 no verdict (SUITE=, TIER=ready|default|full)
	@$(BIN)/assay-smoke run --url http://$(HOST):$(PORT) --suite $(SUITE) --tier $(TIER) $(ARGS)

.PHONY: smoke-detection
smoke-detection: env ## how often the battery catches each fault, drawn anew; rewrites the table of docs/coherence.md (about an hour)
	@$(BIN)/assay-smoke detection --out docs/results/smoke-detection.json --docs docs/coherence.md $(ARGS)

.PHONY: smoke-lm-eval
smoke-lm-eval: env ## GSM8K scored by us and by lm-eval on the same file (makes .cache/lm-eval)
	@test -x .cache/lm-eval/bin/lm-eval || { "$(PYTHON)" -m venv .cache/lm-eval && .cache/lm-eval/bin/pip install --quiet 'lm-eval[api]==0.4.13'; }
	@LM_EVAL=$(CURDIR)/.cache/lm-eval/bin/lm-eval $(BIN)/python -m pytest -c plugin/pyproject.toml --rootdir . smoke_tests/tests/test_evaluate.py $(ARGS)

.PHONY: bench-door
bench-door: env ## what the door costs a request, with and without keys
	@$(BIN)/python plugin/benchmarks/door.py $(ARGS)

.PHONY: bench-canary
bench-canary: env ## what the canary costs a loaded server (starts the miniature)
	@$(BIN)/python smoke_tests/benchmarks/canary.py $(ARGS)

.PHONY: battery
battery: env ## ask a server that `make serve` started the miniature's battery of questions
	@$(BIN)/python models/miniature/battery.py run --url http://$(HOST):$(PORT) $(ARGS)

.PHONY: battery-dialects
battery-dialects: env ## serve the miniature as bf16 and in dialects A, B and C, and ask each the battery
	@$(BIN)/python models/miniature/battery_by_dialect.py $(ARGS)

.PHONY: load
load: env-gate ## a workload against a running server (WORKLOAD=chat, SCALE=miniature, HOST=, PORT=, OUT=)
	@$(GATE_BIN)/assay-load run $(WORKLOAD) --scale "$(SCALE)" --url http://$(HOST):$(PORT) --out $(OUT) $(ARGS)

.PHONY: gate
gate: env-gate ## judge a running server (POLICY=miniature, BASELINE=.assay/baseline.json, HOST=, PORT=, OUT=)
	@$(GATE_BIN)/assay-gate run --policy $(POLICY) --baseline $(BASELINE) --url http://$(HOST):$(PORT) --out $(OUT) $(ARGS)

.PHONY: gate-baseline
gate-baseline: env-gate ## measure a running server that is known to be good, for `make gate`
	@mkdir -p .assay
	@$(GATE_BIN)/assay-gate baseline --policy $(POLICY) --write $(BASELINE) --url http://$(HOST):$(PORT) --out $(OUT) $(ARGS)

.PHONY: gate-stability
gate-stability: env-gate ## how often the gate is wrong: 100 healthy and 100 slowed servers, the miniature 10 + 10
	@$(GATE_BIN)/python loadtest/benchmarks/gate_stability.py $(ARGS)

.PHONY: bench-load
bench-load: env-gate ## what the load generator costs and errs by, beside vllm bench serve and guidellm
	@$(GATE_BIN)/python loadtest/benchmarks/client.py $(ARGS)

.PHONY: lock-gate
lock-gate: ## remake the locks of the light packages (ARGS=--upgrade); needs the package index
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	"$(PYTHON)" -m venv "$$folder"; "$$folder/bin/pip" install --quiet uv==0.13.9; \
	for name in gate dev; do "$$folder/bin/uv" pip compile --quiet --generate-hashes --no-header --no-annotate \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 $(ARGS) \
		-o loadtest/requirements/$$name.lock loadtest/requirements/$$name.in; done

.PHONY: env-gate
env-gate: ## .venv-gate for load tests and the gate, from pinned, hashed locks; no torch, no vLLM
	@"$(PYTHON)" loadtest/requirements/env.py

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
	@rm -rf .venv .venv-gate .venv-gpu .assay $(K8S) .mypy_cache .ruff_cache .pytest_cache .hypothesis */src/*.egg-info */build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
