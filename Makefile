# Everything runs in .venv, which is made from the pinned constraints on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SGLANG := .venv-sglang
LM_EVAL := .venv-lm-eval
INSPECT := .venv-inspect
OPENENV := .venv-openenv
PEERS := tests/tasks/evaluation/benchmarks/parity
VERL := .venv-verl
TRL := .venv-trl
TRL_TEMPLATES := build/trl/.installed
PARITY := tests/parity
SLIME ?= ../slime
SLIME_COMMIT ?= $(shell git -C $(SLIME) rev-parse --short HEAD 2>/dev/null || echo unknown)
STAMP := $(VENV)/.installed
TORCH := $(VENV)/.torch
# A worker that crashed is not replaced: --dist loadfile would wait for its tests for ever.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 15
# What is never imported need not be compiled, and most of what is installed never is.
INSTALL := install --quiet --disable-pip-version-check --no-compile
# One environment is made on each of two cores: pip works on one. The longest way goes first: .venv, then mypy.
BESIDE := $(MAKE) --jobs 2
KILLS ?= 100
# Give an environment .venv's torch, as links where the file system has them, else as a copy. pip then finds it installed.
TORCH_FILES := $(addprefix $(VENV)/lib/python3.*/site-packages/,torch torch-* functorch torchgen)
link-torch = for how in -alf -af; do cp $$how $(TORCH_FILES) $(1)/lib/python3.*/site-packages/ && break; done
ROOMS := flows tasks engines storage configs

# Tests start hundreds of processes, each of which would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup sglang-env lm-eval-env inspect-env openenv-env quickstart tiny types docs lint test test-proofs test-all test-ceph chaos bench
.PHONY: clean parity slime-examples slime-scripts gpu gpu-wheels

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch first and alone: its CPU build satisfies the pin, so nothing pulls CUDA packages on a machine without a GPU.
$(TORCH): constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Cairn needs Python 3.11 or 3.12, found {sys.version.split()[0]}; try make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(INSTALL) -c constraints.txt torch
	@touch $@

# megatron-core has wheels for Python 3.11 too, though its metadata asks for 3.12.
$(STAMP): $(TORCH) pyproject.toml constraints.txt
	$(BIN)/pip $(INSTALL) --no-deps --ignore-requires-python $(shell grep ^megatron-core== constraints.txt)
	$(BIN)/pip $(INSTALL) -c constraints.txt -e '.[test]'
	@touch $@

setup: $(STAMP) ## Make .venv with everything in it

# What .venv has of torch is linked: an environment with a torch of its own takes half a gigabyte more.
$(SGLANG)/.installed: engines/rollout/sglang/requirements.txt $(TORCH)
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(call link-torch,$(SGLANG))
	$(SGLANG)/bin/pip $(INSTALL) torch==2.13.0
	$(SGLANG)/bin/pip $(INSTALL) -r engines/rollout/sglang/requirements.txt
	$(SGLANG)/bin/pip $(INSTALL) --no-deps torchvision==0.28.0 sglang==0.5.23
	@touch $@

sglang-env: $(SGLANG)/.installed ## Make .venv-sglang: SGLang on a machine without a GPU

$(LM_EVAL)/.installed: $(PEERS)/requirements.txt
	test -x $(LM_EVAL)/bin/python || $(PYTHON) -m venv $(LM_EVAL)
	$(LM_EVAL)/bin/pip $(INSTALL) -r $(PEERS)/requirements.txt
	@touch $@

lm-eval-env: $(LM_EVAL)/.installed ## Make .venv-lm-eval: lm-evaluation-harness, which scores are held to

$(INSPECT)/.installed: tests/flows/evaluation/inspect_logs/requirements.txt
	test -x $(INSPECT)/bin/python || $(PYTHON) -m venv $(INSPECT)
	$(INSPECT)/bin/pip $(INSTALL) -r tests/flows/evaluation/inspect_logs/requirements.txt
	@touch $@

inspect-env: $(INSPECT)/.installed ## Make .venv-inspect: Inspect, which reads the logs that are written for it

# Without what its command line and its web page need, which is most of it.
$(OPENENV)/.installed: tests/engines/agents/environments/requirements.txt
	test -x $(OPENENV)/bin/python || $(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/pip $(INSTALL) -r tests/engines/agents/environments/requirements.txt
	$(OPENENV)/bin/pip $(INSTALL) --no-deps openenv==0.10.0
	@touch $@

openenv-env: $(OPENENV)/.installed ## Make .venv-openenv: OpenEnv, whose servers are spoken to

# TRL's chat templates, without TRL's environment.
$(TRL_TEMPLATES): bench/trl-requirements.txt $(STAMP)
	$(BIN)/pip $(INSTALL) --no-deps --upgrade --target $(@D) $(shell grep ^trl== bench/trl-requirements.txt)
	@touch $@

$(VERL)/.installed: $(PARITY)/requirements.txt $(TORCH)
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(call link-torch,$(VERL))
	$(VERL)/bin/pip $(INSTALL) torch==2.13.0
	$(VERL)/bin/pip $(INSTALL) -r $(PARITY)/requirements.txt
	$(VERL)/bin/pip $(INSTALL) --no-deps verl==0.9.1
	@touch $@

slime-scripts: setup ## Import, validate and plan every launch script of the slime at SLIME=DIR
	$(BIN)/python -m tests.flows.importing.slime_scripts $(SLIME)

parity: setup $(VERL)/.installed ## Record what verl, TRL and the slime at SLIME=DIR make of tests/parity's batch
	$(BIN)/python -c 'from bench.trl_process import install; install()'
	$(BIN)/python $(PARITY)/batch.py $(PARITY)/batch.json
	$(VERL)/bin/python $(PARITY)/verl_values.py $(PARITY)/batch.json $(PARITY)/values/verl.json
	$(TRL)/bin/python $(PARITY)/trl_values.py $(PARITY)/batch.json $(PARITY)/values/trl.json
	$(VERL)/bin/python $(PARITY)/slime_values.py $(SLIME) $(SLIME_COMMIT) $(PARITY)/batch.json $(PARITY)/values/slime.json

slime-examples: setup ## Run the examples of the slime at SLIME=DIR, unchanged, and record what came out
	PYTHONPATH=. $(BIN)/python -P $(PARITY)/slime_examples.py $(SLIME) $(SLIME_COMMIT) $(PARITY)/values/slime_examples.json

tiny: setup ## Build the tiny model and its data set (cached)
	$(BIN)/python -m examples.quickstart.build

quickstart: tiny ## Train the tiny model with the whole pipeline and show what came out
	$(BIN)/cairn train configs/recipes/quickstart.yaml
	$(BIN)/python -m examples.quickstart.report

types: # The folders under the names by which they are imported, for who reads and does not import
	@mkdir -p build/types/cairn && ln -sfn $(foreach file,$(ROOMS) $(wildcard cairn/*.py) cairn/slime,../../../$(file)) build/types/cairn/

lint: setup types ## Lint and check types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: ## Lint, check types, run what runs in pytest's own process and one whole path of every real part: 10 minutes
	$(BESIDE) lint sglang-env
	$(PYTEST) --tier quick --shares

test-proofs: ## The same with the proofs of every promise: what continuous integration runs, 30 minutes
	$(BESIDE) lint sglang-env
	$(PYTEST) --tier proofs

test-all: ## Everything, test-ceph too; appends what ran to tests/record.jsonl: 75 minutes
	$(BESIDE) lint sglang-env lm-eval-env inspect-env openenv-env $(TRL_TEMPLATES)
	$(PYTEST) --tier all --record all
	$(MAKE) test-ceph

test-ceph: setup ## Run the storage tests against a real Ceph RGW from Debian packages
	$(BIN)/python -m pytest -m ceph --record ceph tests/ceph

chaos: sglang-env setup ## Kill everything at every step, then KILLS=100 times at random, also amid episodes; report, tally
	$(BIN)/python -m tests.chaos --kills $(KILLS)
	KILLS=$(KILLS) $(BIN)/python -m pytest tests/chaos/test_episodes.py

bench: setup ## Run the benchmarks of bench/README.md
	$(BIN)/python -m bench

# Not after `setup`: a machine with one GPU may have a Python with PyTorch and nothing else of Cairn's.
gpu: ## Test and measure the engines on one GPU: 8 minutes (docs/gpus.md)
	PYTHON=$(PYTHON) tests/gpu/one_gpu.sh

gpu-wheels: ## Load what a bare machine with PyTorch and one GPU lacks: build/wheels
	PYTHON=$(PYTHON) tests/gpu/one_gpu.sh wheels

docs: setup types ## Build the documentation as a site: build/site/index.html
	$(BIN)/python -m docs.generate
	$(BIN)/mkdocs build --strict --quiet

clean: ## Remove what was built; runs stay
	rm -rf build $(VENV) $(SGLANG) $(LM_EVAL) $(INSPECT) $(OPENENV) $(VERL)
