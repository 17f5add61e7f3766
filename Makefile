# `make test` and `make benchmark` set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# bytecode is written for what is imported, by whoever imports it first: the install needs not compile everything
export PYTHONDONTWRITEBYTECODE =
PIP := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt

# an independent Gauss–Newton matrix for the tests; without its dependencies, which ask for torchvision
REFERENCE := curvlinops-for-pytorch backpack-for-pytorch unfoldNd einconv linear_operator opt-einsum einops

.PHONY: test test-matrix benchmark docs clean reference

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types && exit $$tests

# the tests as on other machines; part of it with ARGS="avx2 two-threads"
test-matrix: $(READY)
	$(BIN)/python tests/matrix.py $(ARGS)

benchmark: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# the site: docs/_build/html/index.html; models this small are slower on two threads than on one
docs: $(READY)
	$(PIP) -e '.[docs]'
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

# torch first and pinned: a range would bring its newest release and several GB of CUDA packages
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade-strategy only-if-needed torch
	$(PIP) -e '.[all,bench,dev]'
	$(PIP) --no-deps $(REFERENCE)
	touch $(READY)

# what the tests need beside the extras
reference:
	@echo $(REFERENCE)

clean:
	rm -rf $(VENV) build dist docs/_build docs/gallery .mypy_cache .pytest_cache .ruff_cache
