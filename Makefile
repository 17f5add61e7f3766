# `make test` and `make benchmark` set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# an independent Gauss–Newton matrix for the tests; without its dependencies, which ask for torchvision
REFERENCE := curvlinops-for-pytorch backpack-for-pytorch unfoldNd einconv linear_operator opt-einsum einops

.PHONY: test test-matrix benchmark docs clean reference

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

# the site: docs/_build/html/index.html
docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	OMP_NUM_THREADS=2 $(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

# torch first and pinned: a range would bring its newest release and several GB of CUDA packages
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,bench,dev]'
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt $(REFERENCE)
	touch $(READY)

# what the tests need beside the extras
reference:
	@echo $(REFERENCE)

clean:
	rm -rf $(VENV) build dist docs/_build docs/gallery .mypy_cache .pytest_cache .ruff_cache
