# Every target works in .venv, which is made on first use. A .venv that is already there is completed, not replaced.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.requirements-installed
export PYTHONPATH := torch-ext

.PHONY: help venv demo test build check-build publish hub-demo sweep sweep-short lint format clean

help:
	@echo "make demo    a real language model with our layers beside the stock one"
	@echo "make test    all tests"
	@echo "make build   the Hub variants, in build/; with ALLOW_DIRTY=1 although changes are not committed"
	@echo "make check-build  each rule of a Hub kernel, held against build/"
	@echo "make publish REPO=owner/name [PUBLISH_ARGS=--dry-run]  build, check, prove, upload"
	@echo "make hub-demo     publish, lock, download and load against a Hub on this machine"
	@echo "make sweep   all families of models, stock and with our layers; sweep-short a subset"
	@echo "make lint    ruff, mypy, clang-format"
	@echo "make format  rewrite the sources as make lint wants them"

venv: $(STAMP)

# torch alone and first: the packages after it then find it installed and no resolver replaces it.
$(STAMP): requirements-dev.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$$(grep '^torch==' requirements-dev.txt)"
	$(PY) -m pip install --quiet --requirement requirements-dev.txt
	touch $@

build: $(STAMP)
	$(PY) -m tools.build_variants $(if $(ALLOW_DIRTY),--allow-dirty)

check-build: build
	$(PY) -m tools.check_build

publish: $(STAMP)
	$(PY) -m tools.publish $(REPO) $(PUBLISH_ARGS)

hub-demo: $(STAMP)
	$(PY) -m tools.hub_demo

demo: $(STAMP)
	$(PY) -m tools.demo

# One process a core, each with one thread: torch's threads would wait for each other.
PYTEST_ARGS ?= -n 2
test: export OMP_NUM_THREADS = 1
test: $(STAMP)
	$(PY) -m pytest $(PYTEST_ARGS)

CXX_SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.cpp' '*.h' '*.hpp')

# Every family of transformers with an RMSNorm, stock and with its plan; all of them write docs/models.md, ten minutes.
sweep: $(STAMP)
	$(PY) -m tools.sweep $(if $(SWEEP_ARGS),$(SWEEP_ARGS),--table docs/models.md)

sweep-short: $(STAMP)
	$(PY) -m tools.sweep --short $(SWEEP_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(if $(CXX_SOURCES),$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES))

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(if $(CXX_SOURCES),$(VENV)/bin/clang-format -i $(CXX_SOURCES))

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache

-include tools/native/native.mk
-include tools/version_matrix/version_matrix.mk
-include tools/mutation/mutation.mk
-include tools/check_cuda/check_cuda.mk
