# `make generate` and `make test` are all a newcomer needs: both make the virtual environment first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The two branches of guidance, one on each device: the cheapest way to share a small model.
DEVICES ?= --devices 2 --cfg 2
CONFIG ?= cfg=2
OUT ?= outputs
PROMPTS ?= "a red fox" "a cactus" "a pizza" "a red apple"

.PHONY: generate test test-share test-all test-faults oldest newest development test-rules test-detail lint format bench bench-overhead bench-training figures gpu-check docs wheel release-check clean

$(BIN)/ditmesh: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(BIN)/ditmesh

generate: $(BIN)/ditmesh  ## generate pictures with two worker processes and the embedded model, and compare with one device
	$(BIN)/ditmesh generate $(PROMPTS) $(DEVICES) --out $(OUT)
	$(BIN)/ditmesh verify $(CONFIG)

# Two processes, each a file at a time and in the order of folders, so that the modules of a folder are imported once. At the
# lowest priority: a server's ranks take a lower one, and would starve beside the other process.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder
test: $(BIN)/ditmesh  ## the tests that every change must pass
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -q -m "not matrix" $(IN_TWO)

# One of N shares of all tests, the cells of the matrix among them: make test-share SHARE=2/12. CHOSEN="-m matrix" leaves out
# what `make test` runs. Shares are balanced by tests/data/seconds.json.
test-share: $(BIN)/ditmesh  ## one share of all tests, such as SHARE=2/12
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -q --share $(or $(SHARE),1/12) $(CHOSEN) $(IN_TWO)

# What cells of the matrix found, and at which commit, goes to docs/support.md and its data; a change of src is committed before.
test-all: $(BIN)/ditmesh  ## all tests, and what they find is recorded
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -q --record $(IN_TWO)

# Wrong edits of the product, one at a time in a copy, each with the tests that must see it: make test-faults ONLY=ring-order,
# or SHARE=2/8 for one of eight shares. Prints the table, and writes it to docs/planted-faults.md.
test-faults: $(BIN)/ditmesh  ## whether the tests see planted faults
	$(BIN)/python tests/faults/planting.py $(if $(ONLY),--only $(ONLY)) $(if $(SHARE),--share $(SHARE))

# In an empty environment, which needs a network: make oldest TRY="--folder /tmp/oldest" keeps it.
oldest newest development:  ## what a newcomer runs, with the oldest or newest packages allowed, or diffusers' main branch
	$(PYTHON) .ci/environments.py $@ $(TRY)

# The folder of rules whole, and what tests of several ranks do, held to NCCL's rules: once with communicators for groups, a
# part again with one for each pair of ranks. What tests gloo or shared memory itself is skipped, and files that start no ranks are left out.
ON_RULES = $(shell grep -lE 'def test_.*ranks|RankPool|import .*processes' $(filter-out tests/strategies/test_matrix.py,$(wildcard \
	tests/comm/test_*.py tests/engine/test_*.py tests/strategies/test_*.py)) tests/launch/test_faults.py tests/train/test_train.py)
ON_PAIRS := tests/comm/test_comm.py tests/strategies/test_parity.py tests/strategies/test_pipefusion.py tests/strategies/test_displaced.py
test-rules: $(BIN)/ditmesh  ## the tests of several ranks over a process group that holds them to NCCL's rules
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -q rules $(IN_TWO)
	OMP_NUM_THREADS=1 DITMESH_FAKE_DEVICE=chip nice -n 19 $(BIN)/python -m pytest -q rules/test_fake_*.py $(IN_TWO)
	OMP_NUM_THREADS=1 DITMESH_TEST_BACKEND=rules $(BIN)/python -m pytest -q -m "not matrix" $(ON_RULES)
	OMP_NUM_THREADS=1 DITMESH_TEST_BACKEND=rules DITMESH_RULES_MODE=lazy $(BIN)/python -m pytest -q -m "not matrix" $(ON_PAIRS)

# What torch itself compares: kind, shapes and dtype of every collective. It numbers messages over gloo among collectives, so that
# ranks of one group with unequal numbers of messages (tests/comm, stages) look unlike; over NCCL they are numbered apart.
ON_DETAIL := tests/strategies/test_parity.py tests/strategies/test_displaced.py
test-detail: $(BIN)/ditmesh  ## tests of several ranks under torch's comparison of collectives
	OMP_NUM_THREADS=1 TORCH_DISTRIBUTED_DEBUG=DETAIL $(BIN)/python -m pytest -q -m "not matrix" $(ON_DETAIL)

CODE := conftest.py src tests rules benchmarks training examples
lint: $(BIN)/ditmesh  ## formatting, lint, types
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/python .ci/house.py
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(BIN)/ditmesh
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# AGAINST=../old/src measures another version in turns with this one, here and below.
bench: $(BIN)/ditmesh  ## paired measurements on this machine; wants it quiet
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/exact.py $(if $(AGAINST),--against $(AGAINST))

bench-overhead: $(BIN)/ditmesh  ## what the engine costs the host
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py $(if $(AGAINST),--against $(AGAINST))

bench-training: $(BIN)/ditmesh  ## curves, memory and speed of training; wants the machine quiet
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/training.py

figures: $(BIN)/ditmesh  ## figures and tables of docs/lab, from benchmarks/measured
	$(BIN)/python benchmarks/figures.py
	$(BIN)/python benchmarks/tables.py --write

# With another Python that has torch and diffusers: make gpu-check GPU_PYTHON=python3. In three commands that end within ten
# minutes each: make gpu-check GPU_CHECK="--run first --budget 570", then "--run second …" and "--run third …". Without a GPU:
# make gpu-check GPU_CHECK="--device cpu --quick".
GPU_PYTHON ?= $(BIN)/python
gpu-check: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(BIN)/ditmesh)  ## all that one GPU can prove, in less than thirty minutes
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_check $(GPU_CHECK) --json gpu-check.json --markdown gpu-check.md

docs: $(BIN)/ditmesh  ## the documentation site, into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(BIN)/ditmesh  ## the wheels of the code and of the embedded models, into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist . ./src/ditmesh/zoo

release-check: $(BIN)/ditmesh  ## sdists and wheels, checked and tried in a fresh environment, into dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/python .ci/release.py

clean:
	rm -rf $(VENV) outputs build dist site .pytest_cache .ruff_cache
