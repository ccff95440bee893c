# `make test` and `make demo` work in a fresh clone: each makes .venv and installs the built wheel first. Once that is
# done they need no network. An editable install is not used: it would expose the bare folders `store` and `schemas`.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# torch_npu has wheels per CPython minor; 3.11 is what CANN images carry.
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
# An index of CPU builds of torch, where you have one: it spares the CUDA libraries.
TORCH_INDEX ?=
TORCH := torch==2.13.0 torch_npu==2.13.0 numpy pyyaml packaging

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
WHEELS := $(VENV)/wheel
# The installed wheel is what runs, not the checkout.
unexport PYTHONPATH
# More arguments for pytest: make test ARGS='tests/cli -x'
ARGS ?=
# Processes that tests run in. A file's tests stay together, since they share what is dear to make; long files begin.
WORKERS ?= 2
PYTEST := $(VENV)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

SOURCES := $(shell find -L cachectl -type f ! -name '*.py[co]')

.PHONY: help venv wheel test nightly demo lint bench bench-quick clean
help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 22

venv: $(VENV)/.installed ## make .venv with torch, torch_npu, the tools and the built wheel

wheel: $(VENV)/.wheel ## build the wheel into .venv/wheel
	@ls $(WHEELS)/*.whl

test: $(VENV)/.installed ## run the tests on the installed wheel, real compiles too
	CACHECTL_TEST_INSTALLED=1 $(PYTEST) -m "not nightly" $(ARGS)

nightly: $(VENV)/.installed ## run every test, also those too long for CI
	CACHECTL_TEST_INSTALLED=1 $(PYTEST) $(ARGS)

demo: $(VENV)/.installed ## build, hand out and prove a small model's cache on the simulated CANN
	$(VENV)/bin/python examples/demo.py $(ARGS)

lint: $(VENV)/.installed ## check style, types, layers and the wheel's contents
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/check-wheel-contents $(WHEELS)

bench-quick: $(VENV)/.installed ## run the benchmarks with few repetitions and smaller sizes
	$(VENV)/bin/python bench/run.py --quick $(ARGS)

bench: $(VENV)/.installed ## run the benchmarks that the budgets are held against
	$(VENV)/bin/python bench/run.py $(ARGS)

clean: ## remove .venv and what tools left
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/.made:
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet build hatchling
	touch $@

# Changes when a source is added or removed, which the others' timestamps don't tell.
$(VENV)/.sources: FORCE | $(VENV)/.made
	@find -L cachectl -type f ! -name '*.py[co]' | LC_ALL=C sort >$@.new; \
	if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:

$(VENV)/.wheel: $(SOURCES) $(VENV)/.sources pyproject.toml README.md LICENSE $(VENV)/.made
	@rm -rf $(WHEELS)
	$(VENV)/bin/python -m build --wheel --no-isolation --outdir $(WHEELS) . >$(VENV)/build.log 2>&1 \
	  || { cat $(VENV)/build.log; exit 1; }
	@touch $@

# pip asks no index for what is installed and fits: quick, and offline, when only the tools' settings have changed.
$(VENV)/.dependencies: pyproject.toml Makefile | $(VENV)/.wheel
	$(PIP) install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH) \
	  "$$(ls $(WHEELS)/*.whl)[dev,postgres,sign]"
	@touch $@

$(VENV)/.installed: $(VENV)/.wheel $(VENV)/.dependencies
	$(PIP) install --quiet --no-deps --no-index --force-reinstall $(WHEELS)/*.whl
	@touch $@
