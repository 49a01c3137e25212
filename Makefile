# `make demo` and `make test` need Python >= 3.10 and nothing else; the first call makes the virtual environment.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.smollm2
# A worker for each processor, so one thread for each worker; threads that wait would spin on the others' processors.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal --durations=10

.PHONY: help install demo serve test test-lab test-slow test-sanitized docs lint format clean
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
	@echo "make test-sanitized  run the tests of the kernels with AddressSanitizer and UndefinedBehaviorSanitizer; needs g++"
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
	$(PYTEST) -m slow tests
	$(PYTEST) -m slow lab/tests

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Apart from the others: Triton says at the end of every process that has imported it what it leaked.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt triton
	$(PYTEST) tests/gpu lab/tests/offline lab/tests/roofline lab/tests/test_documents.py

# Kernels that end the process where they read or write outside their memory, or do what C++ leaves undefined.
# The level is the highest, or that of SELFSPEC_KERNELS; two threads, so that work is divided.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined -O1 -g1
SANITIZED := $(addprefix tests/,$(addprefix runtimes/test_,adapting.py blocks.py cache_bits.py drawing.py latent.py \
	low_bit.py mixtures.py native.py quantise.py reading.py recurrent.py seen_text.py several_sequences.py shadow_head.py) \
	$(addprefix loading/test_,gguf_experts.py gguf_hybrids.py gguf_model.py mxfp4_checkpoints.py quantised_checkpoints.py) \
	decoding/test_chains.py decoding/test_runs.py decoding/test_siblings.py)
test-sanitized: $(INSTALLED)
	LD_PRELOAD="$(foreach library,asan ubsan stdc++,$(shell g++ -print-file-name=lib$(library).so))" CXX=g++ CXXFLAGS="$(SANITIZERS)" \
		ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 OMP_NUM_THREADS=2 $(BIN)/python -m pytest --quiet --capture=no $(SANITIZED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src lab/selfspec_lab

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
