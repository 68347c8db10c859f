# Each target makes its own virtual environment in .venv on first use. `make PYTHON=python3.12 …` chooses the interpreter.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

new_enough := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(new_enough)' 2>/dev/null && echo "$$p" && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --no-input install -qq --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt

# The tiny models are too small for several threads an operation; on a busy machine more threads are ten times slower.
one_thread := OMP_NUM_THREADS=1
# Hundreds of processes start in the tests, so bytecode is kept whatever the environment says.
# The files of tests are shared out among as many processes as there are cores; ARGS="-n 0" runs them in one.
tests := PYTHONDONTWRITEBYTECODE= $(one_thread) $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

.PHONY: help quickstart smollm2 test check format docs bench clean
help: ## Show this help
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(VENV)/.train ## Train a tiny language model, one step off-policy (about two minutes on two CPU cores)
	@$(BIN)/offbeat train examples/quickstart.toml $(ARGS)

smollm2: $(VENV)/.train ## Train SmolLM2-135M-Instruct to do short sums (downloads it first; a quarter of an hour or more)
	@$(BIN)/python examples/smollm2_model.py
	@$(BIN)/offbeat train examples/smollm2_arithmetic.toml $(ARGS)

test: $(VENV)/.dev ## Run all tests but those that need a GPU (minutes)
	@$(tests) -m "not gpu" $(ARGS)

check: $(VENV)/.dev ## Format, lint, types, quick unit tests (up to 90 seconds)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types unit

.PHONY: types unit
types: $(VENV)/.dev
	@$(BIN)/pyright

unit: $(VENV)/.dev
	@$(tests) -q -m "not slow" tests/unit $(ARGS)

format: $(VENV)/.dev ## Format the code and mend what the linter can mend
	@$(BIN)/ruff check --quiet --fix-only . && $(BIN)/ruff format .

docs: $(VENV)/.docs ## Build the documentation's site into site/ and check its links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean
	@echo "Built site/. To read it: $(BIN)/python -m http.server --directory site (without a server there is no search)"

bench: $(VENV)/.dev ## Run every script in benchmarks/
	@set -- benchmarks/*.py; [ -e "$$1" ] || { echo "benchmarks/ has no scripts." >&2; exit 1; }; \
	for script in "$$@"; do echo "== $$script"; $(BIN)/python "$$script"; done

clean: ## Remove the virtual environment and caches (runs/ stays)
	@rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis

# --- the environment ------------------------------------------------------------------------------------------------

# A stamp is written when everything before it has worked: an interrupted set-up is taken up again.
$(VENV)/.train: $(VENV)/.torch
	@echo "[3/3] installing offbeat"
	@$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	@echo "[3/3] installing offbeat with tasks and development tools"
	@$(PIP) --editable '.[train,tasks,dev]'
	@touch $@ $(VENV)/.train

$(VENV)/.docs: $(VENV)/.made $(INPUTS)
	@echo "installing what builds the site"
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.torch: $(VENV)/.made $(INPUTS)
	@echo "[2/3] installing $$(grep ^torch constraints.txt) (the largest part; several minutes on a slow line)"
	@$(PIP) torch
	@touch $@

$(VENV)/.made:
	@[ -n "$(PYTHON)" ] || { echo "offbeat needs Python 3.11 or newer, and there is none on the PATH" \
	  "(python3 is $$(python3 --version 2>&1 || true)). Install one, or run: make PYTHON=/path/to/python3.12 …" >&2; exit 1; }
	@"$(PYTHON)" -c '$(new_enough)' || { echo "offbeat needs Python 3.11 or newer; $(PYTHON) is" \
	  "$$("$(PYTHON)" --version 2>&1 | head -n 1 || true). Run: make PYTHON=/path/to/python3.12 …" >&2; exit 1; }
	@echo "[1/3] making $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment;" \
	  "on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@touch $@
