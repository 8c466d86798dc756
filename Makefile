# `make demo` and `make test` need Python 3.10+ and make; everything else is installed into .venv.
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadgroup
DEMO_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
DEMO_STAMP := .venv/.installed-demo

# The oldest transformers that pyproject.toml admits, with an environment of its own.
OLDEST := 5.15.1
OLDEST_BIN := .venv-oldest/bin
OLDEST_STAMP := .venv-oldest/.installed

.DEFAULT_GOAL := help
.PHONY: help .venv demo test test-slow test-oldest lint format clean

help:
	@echo "make demo         a tour in four minutes: train, load, generate, remember, surprise, lm-eval (DEMO_ARGS=...)"
	@echo "make test         the test suite (PYTEST_ARGS=...)"
	@echo "make test-slow    the tests that take longer"
	@echo "make test-oldest  the test suite on transformers $(OLDEST)"
	@echo "make lint         ruff and the import contracts"
	@echo "make format       let ruff rewrite the files"
	@echo "make clean        remove caches and build products (.venv and runs/ stay)"

.venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	touch $@

# The demo needs less than the tests: it is ready sooner.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e ".[eval,viz]"
	touch $@

demo: $(DEMO_STAMP)
	$(BIN)/python scripts/demo.py $(DEMO_ARGS)

$(OLDEST_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	sed -E '/^(transformers|huggingface_hub|tokenizers)==/d' constraints.txt > .venv-oldest/constraints.txt
	echo "transformers==$(OLDEST)" >> .venv-oldest/constraints.txt
	$(OLDEST_BIN)/python -m pip install $(PIP_ARGS) -c .venv-oldest/constraints.txt -e ".[dev]"
	touch $@

# One thread per worker: two workers with two threads each would fight over the cores of a small machine.
test test-slow test-oldest: export OMP_NUM_THREADS = 1

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-oldest: $(OLDEST_STAMP)
	$(OLDEST_BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
