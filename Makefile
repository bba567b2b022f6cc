# Every target works first, alone, in a fresh clone. `make` prints what there is.

VENV := .venv
PY := $(VENV)/bin/python

# What an earlier set-up installed stays the default: on a GPU host `make setup LOCK=requirements/gpu.txt` once, then
# `make test`, `make tour` as anywhere.
INSTALLED := $(patsubst $(VENV)/.ready-%,requirements/%.txt,$(wildcard $(VENV)/.ready-*))
LOCK ?= $(or $(firstword $(INSTALLED)),requirements/cpu.txt)
STAMP := $(VENV)/.ready-$(notdir $(basename $(LOCK)))

# A wheel index to look in besides pip's own: on Linux without a GPU, PyTorch's CPU index spares gigabytes of CUDA.
TORCH_INDEX ?=
# The interpreter that makes .venv; empty: the first suitable one of those below.
PYTHON ?=
# More arguments for the target's command, as in `make test ARGS="tests/comm -x"`.
ARGS ?=

# The GPU lock holds for Python 3.12 alone, the CPU lock for 3.11 to 3.13.
ifeq ($(notdir $(LOCK)),gpu.txt)
MINORS := 12
CANDIDATES := python3.12 python3
else
MINORS := 11 12 13
CANDIDATES := python3 python3.13 python3.12 python3.11 python
endif
VERSIONS := $(patsubst %,3.%,$(MINORS))
SUITABLE := import sys; sys.exit(sys.version_info[0] != 3 or str(sys.version_info[1]) not in "$(MINORS)".split())

.DEFAULT_GOAL := help
.PHONY: help setup tour test lab lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  make setup LOCK=requirements/gpu.txt   on a host with Hopper GPUs (Python 3.12, torch 2.11)"
	@echo "  make setup TORCH_INDEX=URL             a CPU wheel index, to spare CUDA where there is no GPU"
	@echo "  make setup PYTHON=/path/to/python      with this interpreter"
	@echo "  make test ARGS='tests/comm -x'         more arguments for the command"

setup: $(STAMP)  ## make .venv with the locked versions and this clone in it
	@echo "$(VENV) is ready, as $(LOCK) says"

$(STAMP): $(LOCK) pyproject.toml
	@if [ -e $(VENV) ] && ! $(PY) -c '$(SUITABLE)' 2>/dev/null; then \
	  echo "$(VENV) holds no working Python $(VERSIONS), which $(LOCK) needs; remove the folder and try again" >&2; \
	  exit 1; \
	fi
	@[ -e $(VENV) ] || { \
	  for python in $(if $(PYTHON),"$(PYTHON)",$(CANDIDATES)); do \
	    "$$python" -c '$(SUITABLE)' 2>/dev/null && break || python=; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "no Python among these is of a version that $(LOCK) is for ($(VERSIONS)):" \
	         "$(or $(PYTHON),$(CANDIDATES))." >&2; \
	    echo "Install one, or name it: make setup PYTHON=/path/to/python" >&2; \
	    exit 1; \
	  fi; \
	  echo "making $(VENV) with $$python"; \
	  "$$python" -m venv $(VENV) || { rm -rf $(VENV); echo "$$python cannot make a virtual environment" \
	    "(on Debian and Ubuntu: install its -venv package)" >&2; exit 1; }; \
	}
	@rm -f $(VENV)/.ready-*
	$(PY) -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $(LOCK)
	$(PY) -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

tour: $(STAMP)  ## run the study small, without a GPU too, and say where its report lies
	$(VENV)/bin/moelab tour $(ARGS)

test: $(STAMP)  ## all tests; those that need a GPU skip themselves where there is none
	$(PY) -m pytest $(ARGS)

lab: $(STAMP)  ## JupyterLab on the notebooks
	$(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks

lint: $(STAMP)  ## ruff over the Python sources
	$(PY) -m ruff check $(ARGS) .

clean:  ## remove reports, builds and caches; .venv and ./records stay
	rm -rf report build dist .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
