# SPDX-License-Identifier: Apache-2.0
# Everything runs from .venv, which `setup` makes; the other targets call it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
BLOCK ?= cell
CONFIG ?= small
# worksteal: neighbours, which share builds, mostly stay on one worker.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help setup demo test test-all verilog lint clean

help:
	@echo "make setup     make .venv with everything in it"
	@echo "make demo      run a decoder layer and a small language model in RTL"
	@echo "make test      the tests; 15 minutes at most on two cores"
	@echo "make test-all  the tests, the long ones included"
	@echo "make verilog   emit BLOCK=$(BLOCK) CONFIG=$(CONFIG) into build/verilog"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove what was built here (the cache is in jalapeno's own directory)"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "missing: python3 (apt install python3)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "missing: Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version)" \
	       "(apt install python3, then make PYTHON=python3.x)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "missing: the venv module (apt install python3-venv)" >&2; exit 1; }
	@for tool in g++ perl; do command -v $$tool >/dev/null || { \
	  echo "missing: $$tool (apt install $$tool)" >&2; exit 1; }; done
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/jalapeno demo

test: $(STAMP)
	$(PYTEST)

test-all: $(STAMP)
	$(PYTEST) -m "slow or not slow"

verilog: $(STAMP)
	$(BIN)/jalapeno verilog $(BLOCK) --config $(CONFIG) -o build/verilog/$(BLOCK)-$(CONFIG)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf build $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
