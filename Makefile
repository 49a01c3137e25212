# `make demo` and `make test` need Python >= 3.10 and nothing else; the first call makes the virtual environment.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.smollm2
# A worker for each processor, so one thread for each worker; threads that wait would spin on the others' processors.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal --durations=10

.PHONY: help install demo serve test test-lab test-slow docs lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make install   make the virtual environment .venv, with selfspec, the laboratory and what the tests need"
	@echo "make demo      chat with a real model by several methods, and compare with plain decoding and transformers"
	@echo "make serve     serve a real model over HTTP, with a page to chat with it"
	@echo "make test      run the tests of the library"
	@echo "make test-lab  run the tests of the laboratory"
	@echo "make test-slow run the tests that take long: soak, Ray, every instruction level, the wheel, every method on smollm2, further cases"
	@echo "make docs      build the documentation as a site in build/site; fails where a link leads nowhere"
	@echo "make test-gpu  run the tests of the Triton kernels in Triton's interpreter; installs Triton"
	@echo "make lint      check style and types"
	@echo "make format    put the code into the project's format"
	@echo "make clean     remove the virtual environment and all caches"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("selfspec needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]" --editable lab
	touch $@

# The real model of the demo and of some tests. Without it they use the bundled checkpoints.
$(MODEL): $(INSTALLED)
	@$(BIN)/selfspec models install smollm2 && touch $@ || \
		echo "smollm2 could not be installed (see above); the bundled checkpoints are used"

demo: $(INSTALLED) $(MODEL)
	$(BIN)/selfspec demo

serve: $(INSTALLED) $(MODEL)
	$(BIN)/selfspec serve --model smollm2

test: $(INSTALLED) $(MODEL)
	$(PYTEST) tests

test-lab: $(INSTALLED) $(MODEL)
	$(PYTEST) lab/tests

test-slow: $(INSTALLED) $(MODEL)
	$(PYTEST) -m slow tests lab/tests

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Apart from the others: Triton says at the end of every process that has imported it what it leaked.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt triton
	$(PYTEST) tests/gpu lab/tests/offline lab/tests/roofline lab/tests/test_documents.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src lab/selfspec_lab

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
