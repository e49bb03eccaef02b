# SPDX-License-Identifier: Apache-2.0
# All set-up goes into .venv; stamps there make a second run start at once.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
KERNEL_SOURCES := $(wildcard kernels/tandem_kernels/cpu/*.[ch]) kernels/build_kernels.py
KERNELS := kernels/tandem_kernels/cpu/tandem_cpu_v3.so kernels/tandem_kernels/cpu/tandem_cpu_v4.so
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Where it is set, the servers and workers of a test run would each compile all that pip did not.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install build demo serve test test-gpu soak check bench clean
.DEFAULT_GOAL := help

help: ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

install: $(INSTALLED) build ## set up .venv: Tandem, torch and Triton server (PYTHON=... names the Python to use)

build: $(KERNELS) ## compile the CPU kernels where their sources have changed

demo: install ## start Triton server, stream the answers to three prompts, stop it
	@$(BIN)/tandem demo $(ARGS)

serve: install ## run Triton server on ports 8000 (HTTP), 8001 (gRPC) and 8002 (metrics)
	@$(BIN)/tandem serve $(ARGS)

WORKERS ?= 2
test: install ## run the tests, those against a real Triton server included (ARGS=... goes to pytest)
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-gpu: $(INSTALLED) ## on a machine with a CUDA device: bit equality of kernels, passes and engine, tandem verify, a real Triton server
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m gpu tests/kernels tests/model $(ARGS)
	@TANDEM_TEST_DEVICE=cuda $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/engine/test_exactness.py tests/engine/test_rounds.py tests/engine/test_sessions.py tests/engine/test_mtp.py \
		tests/engine/test_library_linear.py $(ARGS)
	@$(BIN)/tandem verify --checkpoint model_repository/tandem/1/tandem-pydoc --prompts tests/prompts.jsonl --max-tokens 64
	@$(BIN)/python -m pytest tests/e2e/test_server.py $(ARGS)

SECONDS ?= 600
soak: install ## mixed requests, reloads and kills for 10 minutes: nothing lost, leaked or changed (SECONDS=60: one minute)
	@TANDEM_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest tests/soak -m soak $(ARGS)

check: install ## format check, lint and type check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install ## plain decoding beside transformers, speculation beside plain decoding, gRPC beside the engine
	@$(BIN)/tandem bench plain $(ARGS)
	@$(BIN)/tandem bench decode $(ARGS)
	@$(BIN)/tandem bench serving $(ARGS)

clean: ## remove .venv, the compiled kernels and caches
	rm -rf $(VENV) $(KERNELS) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@python=$$(scripts/find_python) && echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV)

# The build tools first: the packages are then built with them, at the versions of constraints.txt. What pip would compile
# on one core, compileall does on all; some files of packages are templates and no Python.
$(INSTALLED): pyproject.toml client/pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Tandem, torch and Triton server into $(VENV) (minutes on a first run)"
	@$(PIP) install -c constraints.txt --no-compile editables hatchling ziglang
	@$(PIP) install -c constraints.txt --no-compile --no-build-isolation -e "client[gateway,plot]" -e ".[dev,server]"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

$(KERNELS) &: $(KERNEL_SOURCES) | $(INSTALLED)
	@$(BIN)/python kernels/build_kernels.py
