# `make test` and `make benchmark` set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test test-matrix benchmark clean

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

# the tests as on other machines; part of it with ARGS="avx2 two-threads"
test-matrix: $(READY)
	$(BIN)/python tests/matrix.py $(ARGS)

benchmark: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# torch first and pinned: a range would bring its newest release and several GB of CUDA packages
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
