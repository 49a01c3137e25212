# `make demo` and `make test` need Python >= 3.10 and nothing else; the first call makes the virtual environment.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    generate with every bundled checkpoint and method, and compare with plain decoding"
	@echo "make test    run the tests"
	@echo "make lint    check style and types"
	@echo "make format  put the code into the project's format"
	@echo "make clean   remove the virtual environment and all caches"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("selfspec needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/selfspec demo

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --durations=10

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
