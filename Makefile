# make demo    edit real code with the default model (installs what it needs into .venv first)
# make test    all tests
# make lint    ruff (rules and format) and mypy
# make lossless  the long run of the losslessness suite: examples drawn and worst total variation per cell
# Others: make test-quick (without the slow ones), make format, make clean.
#
# Variables: PYTHON=python3.12   another interpreter (3.11 or newer)
#            VENV=path           another place for the environment
#            CONSTRAINTS=        newest versions instead of the pinned ones, or another constraints file
#            PIP_ARGS=...        passed to pip install, for example an index of CPU-only or CUDA builds of torch
#            PYTEST_ARGS=...     passed to pytest, for example PYTEST_ARGS="-k ngram"
#            JOBS=n              test processes (default 2)

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(PIP_ARGS)
INPUTS := pyproject.toml $(CONSTRAINTS)

.PHONY: demo test test-quick lossless lint format clean help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.installed
	$(BIN)/hspark demo

# One thread in each test process: the tests are small, and threads of two processes would only wait for each other.
# Files in their own order: by number of tests, as xdist would have it, the slow ones with few come last and alone.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-quick: PYTEST_ARGS += -m "not slow"
test-quick: test

lossless: $(VENV)/.installed-dev
	$(BIN)/python -m hspark.verify.suite --examples 100 --sampled 3 --samples 50000

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The stamps make a second call do nothing; a change of the pins or of the dependencies installs again.
$(VENV)/.installed: $(INPUTS) | $(VENV)/bin/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(VENV)/bin/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'hspark needs Python 3.11 or newer: make PYTHON=python3.12'; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
