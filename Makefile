# rjax: demo, checks and tests. `make help` lists the targets.
#
#   make demo                    train on digits and show everything
#   make test                    lint, types and tests
#   make test PYTHON=python3.12  with a Python of your choice
SHELL := /bin/sh
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-new lint docs notebooks clean

PYTHON ?= $(shell .ci/find-python)
PYTHON_NEW ?= $(shell .ci/find-python newest)

VENV := .venv
VENV_NEW := .venv-new
STAMP := $(VENV)/.installed
STAMP_NEW := $(VENV_NEW)/.installed
EXTRAS := data,viz,dev
PIP := bin/python -m pip --disable-pip-version-check install -qq

# pyright runs from its own wheel; its notes about newer releases are noise here.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(STAMP) ## train an MLP on digits in fp16 with EMA, into runs/demo
	@rm -rf runs/demo
	$(VENV)/bin/rjax train --out runs/demo

test: lint ## lint, types, then all tests on all cores
	$(VENV)/bin/python -m pytest -n auto --durations=15

test-new: ## all but the slow tests on the newest Python, with the newest jax
	@new=$$($(if $(PYTHON_NEW),'$(PYTHON_NEW)',false) -V 2>/dev/null); \
	if [ -z "$$new" ]; then \
	  echo "test-new: skipped, no Python 3.12 or newer found (set PYTHON_NEW=)"; \
	elif [ "$$new" = "$$($(VENV)/bin/python -V 2>/dev/null)" ]; then \
	  echo "test-new: skipped, $(VENV) already is on the newest Python found"; \
	else \
	  $(MAKE) $(STAMP_NEW) && $(VENV_NEW)/bin/python -m pytest -n auto --durations=15 -m 'not slow'; \
	fi

lint: $(STAMP) ## ruff check, ruff format --check, pyright
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

docs: $(STAMP) ## build the documentation into site/, strictly
	$(VENV)/bin/python -m mkdocs build --strict

notebooks: $(STAMP) ## execute the notebooks and save their outputs
	JAX_PLATFORMS=cpu $(VENV)/bin/python notebooks/execute.py

clean: ## remove environments, runs and caches
	rm -rf $(VENV) $(VENV_NEW) runs site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an install that was cut short is done again.
$(STAMP): pyproject.toml
	$(if $(PYTHON),,$(error no Python 3.11 to 3.14 found; install one or set PYTHON=))
	'$(PYTHON)' -m venv --clear $(VENV)
	$(VENV)/$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

$(STAMP_NEW): pyproject.toml
	'$(PYTHON_NEW)' -m venv --clear $(VENV_NEW)
	$(VENV_NEW)/$(PIP) -e '.[$(EXTRAS)]'
	@touch $@
