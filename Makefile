# Everything here sets itself up: the first target that needs the environment makes .venv and installs
# into it. PYTHON=python3.12 make test uses another interpreter.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# The name tells where and for which Python the environment was made, so that a moved checkout or another
# PYTHON makes it anew; its age against the prerequisites tells whether to install again.
STAMP := $(VENV)/.pwcc-$(shell printf '%s' "$(CURDIR) $$($(PYTHON) -VV 2>&1)" | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help demo test bench lint fmt soak fuzz zoo gpu-test gpu-bench clean

help:
	@echo "make demo       compile a small model, move the cache, load it without a compiler"
	@echo "make test       lint, types and all tests"
	@echo "make lint       ruff, mypy, pyright"
	@echo "make fmt        format, and fix what ruff can"
	@echo "make bench      CPU benchmarks, then the tables in README.md and docs/"
	@echo "make soak       the store under kill, race and damage for 30 minutes (SOAK_MINUTES=...)"
	@echo "make zoo        every causal LM of the installed transformers, tiny, then docs/zoo.md (ZOO=--only=llama,...)"
	@echo "make fuzz       300 random small models, cold and warm against eager (FUZZ_COUNT=...)"
	@echo "make gpu-test   the tests that need a CUDA device"
	@echo "make gpu-bench  CUDA benchmarks, then the tables in README.md and docs/"
	@echo "make clean      remove the environment, caches and build outputs"

demo: $(STAMP) toolchain
	$(PY) examples/demo.py

test: lint toolchain
	$(PY) -m pytest

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pyright

fmt: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(STAMP) toolchain
	$(PY) benchmarks/run_all.py --device cpu
	$(PY) benchmarks/tables.py

soak: $(STAMP) toolchain
	$(PY) tests/soak/soak.py

zoo: $(STAMP) toolchain
	$(PY) zoo/run.py --jobs 2 $(ZOO); status=$$?; $(PY) zoo/table.py; exit $$status

fuzz: $(STAMP) toolchain
	$(PY) -m tests.fuzz.run --count $${FUZZ_COUNT:-300} --result tests/fuzz/results.json; status=$$?; \
	  $(PY) -m tests.fuzz.table; exit $$status

gpu-test: $(STAMP)
	$(PY) -m pytest -m gpu

gpu-bench: $(STAMP)
	$(PY) benchmarks/run_all.py --device cuda
	$(PY) benchmarks/tables.py

clean:
	rm -rf $(VENV) build dist demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
	find cli cache compile capture src tests benchmarks examples zoo -name __pycache__ -prune -exec rm -rf {} +

# Compiling for a CPU needs a C++ compiler and Python's headers; loading needs neither.
.PHONY: toolchain
toolchain: $(STAMP)
	@command -v "$${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null || \
	  { echo "pwcc: no C++ compiler found. On Debian: apt install g++" >&2; exit 1; }
	@$(PY) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "pwcc: Python.h not found, which C++ kernels include. On Debian: apt install python3-dev" >&2; exit 1; }

# torch first and pinned: a build for another device (2.13.0+cpu) is then found where pip is pointed at one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "pwcc: $(PYTHON) must be Python 3.11, 3.12 or 3.13; set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "pwcc: $(PYTHON) has no venv module. On Debian: apt install python3-venv" >&2; exit 1; }
	@want="$$($(PYTHON) -VV)"; have="$$($(PY) -VV 2>/dev/null || true)"; \
	  if [ "$$want" != "$$have" ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	    echo "pwcc: making $(VENV) ($$want)"; $(PYTHON) -m venv --clear $(VENV); fi
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt -e '.[dev,hf]'
	@rm -f $(VENV)/.pwcc-*; touch $@
