# `make generate` and `make test` are all a newcomer needs: both make the virtual environment first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEVICES ?= 2
OUT ?= outputs
PROMPTS ?= "a red fox" "a cactus" "a pizza" "a red apple"

.PHONY: generate test test-all lint format bench gpu-check clean

$(BIN)/ditmesh: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(BIN)/ditmesh

generate: $(BIN)/ditmesh  ## draw pictures with two worker processes and the embedded model
	$(BIN)/ditmesh generate $(PROMPTS) --devices $(DEVICES) --out $(OUT) --compare

test: $(BIN)/ditmesh  ## the tests that every change must pass
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not matrix"

test-all: $(BIN)/ditmesh  ## the full matrix as well
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: $(BIN)/ditmesh  ## formatting, lint, types
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(BIN)/ditmesh
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

bench: $(BIN)/ditmesh  ## paired measurements on this machine; wants it quiet
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/exact.py

gpu-check: $(BIN)/ditmesh  ## parity and kernels on a CUDA device
	$(BIN)/python benchmarks/gpu_check.py

clean:
	rm -rf $(VENV) outputs build dist .pytest_cache .ruff_cache
