# Every command of this repository; `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The interpreter that .venv is made with; any Python from 3.11 on.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# More arguments for pytest, as in `make test ARGS="-k lock -x"`.
ARGS ?=
# How many tests run side by side on this machine: they wait more than they compute, so one more than there are cores.
JOBS ?= 3
# And against a cluster, whose nodes have room for the pods of so many.
E2E_JOBS ?= 3
# How many seeds the random kills of `make chaos` draw from.
KDIST_SEEDS ?= 20

# Set, it would have every process of every test compile our modules and the tests again.
unexport PYTHONDONTWRITEBYTECODE
# Whether the set-up compiles all that it installs: torch has thousands of modules, and where PYTHONDONTWRITEBYTECODE is set every process would compile them.
COMPILE ?= --compile-bytecode

# Not empty: a test that failed is tried once more, by itself; .ci/run asks for it and names those tests.
AGAIN ?=
# Not empty: what is marked `wide` is left out, of what is marked `sampled` a tenth is drawn, and of what stops machines one test, as .ci/run does.
NARROW ?=
SAMPLED = $(if $(NARROW),-p tests.draw --draw=sampled)

# $(call pytest,TIER): run one tier and leave its counts where .ci/summary.py finds them.
pytest = $(BIN)/python -m pytest --junitxml=.kdist/tiers/$(1).xml -o junit_suite_name=$(1)

# $(call marked,MARK): the files with tests of a mark, and the folders whose conftest.py gives it, so that a tier need not read the others (ten seconds of each worker).
marked = -o testpaths="$(shell grep -rlF --include='*.py' pytest.mark.$(1) tests | sed 's,/conftest\.py$$,,' | LC_ALL=C sort)"

# $(call patiently,TIER,ARGUMENTS): the same, printed as one line, since the command has the names of many files. A try on a machine that has become quieter tells a fault from a busy machine.
define patiently
@echo "pytest, tier $(1)"; $(call pytest,$(1)) -o cache_dir=.kdist/tiers/$(1).cache $(2) || { [[ $$? == 1 && -n "$(AGAIN)" ]] && \
  $(call pytest,$(1).again) -o cache_dir=.kdist/tiers/$(1).cache $(2) --last-failed --last-failed-no-failures none -n 0 -x; }
endef

.PHONY: help setup system demo test fast chaos e2e disruptive acceptance slices compat lint format bench soak docs generate pictures lock clean

help: ## Show this list
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## /\1\t/' | expand -t 12

setup: $(READY) ## Make .venv with everything the project needs; the second time there is nothing to do

$(READY): requirements.txt cli/pyproject.toml controller/pyproject.toml trainer/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kdist needs Python 3.11 or newer, and $(PYTHON) is not: try 'make setup PYTHON=python3.12'" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make virtual environments: on Debian 'apt-get install python3-venv' helps" >&2; exit 1; }
	@# uv itself comes from the lock too, by its hash.
	@sed -n '/^uv==/,/^ *#/p' requirements.txt > $(VENV)/uv.txt
	$(BIN)/python -m pip install --quiet --require-hashes -r $(VENV)/uv.txt
	$(BIN)/uv pip sync --python $(BIN)/python $(COMPILE) --require-hashes requirements.txt
	$(BIN)/uv pip install --python $(BIN)/python --no-build-isolation --no-deps -e trainer -e cli -e controller
	$(BIN)/python -m compileall -q trainer/kdist_trainer cli/kdist controller/kdist_controller
	@touch $@

system: # What the tests need besides Python: installed on Debian as root, named elsewhere
	@tests/install-system.sh

demo: setup ## Train on this machine with two nodes, survive a worker failure
	$(BIN)/python examples/demo.py

test: setup system ## Set up, check the style, run all fast tests (at most ten minutes after the set-up)
	+@$(MAKE) --no-print-directory -j2 lint fast # side by side: the types take one core a minute

# In one go: those that kill processes wait while the others compute, and all are collected once.
fast: setup
	$(call patiently,fast,$(SAMPLED) -m "not (chaos or e2e or acceptance)" -n $(JOBS) --dist=worksteal $(ARGS))

chaos: export KDIST_SEEDS := $(KDIST_SEEDS)
chaos: setup system ## Kill processes, crash nodes and fill disks; an interrupted run continues where it was stopped
	$(call patiently,chaos,$(call marked,chaos) -p tests.resume --resume-file=.kdist/chaos-passed $(SAMPLED) -m "chaos$(if $(NARROW), and not wide)" -n $(JOBS) --dist=worksteal $(ARGS))

e2e: setup system ## Test against a real Kubernetes: kind, started and kept here, or with KDIST_E2E=kubeconfig the cluster of your kubeconfig
	@[[ "$${KDIST_E2E:-}" == kubeconfig ]] || tests/cluster/cluster all
	$(call patiently,e2e,$(call marked,e2e) $(SAMPLED) -m "e2e and not disruptive$(if $(NARROW), and not wide)" --dist=worksteal -n $(E2E_JOBS) $(ARGS))
	$(if $(or $(NARROW),$(filter kubeconfig,$(KDIST_E2E))),,+@$(MAKE) --no-print-directory disruptive)

disruptive: setup system ## Stop machines and controllers of the cluster that is kept here: the end of `make e2e`
	@tests/cluster/cluster all
	$(call patiently,disruptive,$(call marked,disruptive) -m "e2e and disruptive$(if $(NARROW), and not wide" -p tests.draw --draw=one,") -n 0 $(ARGS))

acceptance: setup system ## Install from a fresh clone and from the built wheels, and run the README's commands
	$(call patiently,acceptance,$(call marked,acceptance) -m acceptance -n $(JOBS) --dist=loadfile $(ARGS))

# The oldest torch that the trainer's package accepts.
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1.0/p' trainer/pyproject.toml)

slices: setup ## Delete each option of kdist from a copy of the packages, and use what is left
	$(BIN)/python -m pytest tests/house/test_slices.py -n $(JOBS) $(ARGS)

compat: setup ## Run the tests with real processes on the oldest supported torch and on the newest, each in .venv-compat/VERSION
	@newest=$$(echo torch | $(BIN)/uv pip compile --quiet --python $(BIN)/python --no-deps --no-header --no-annotate - | sed -n 's/^torch==//p'); \
	failed=; \
	for version in $$(printf '%s\n' $(OLDEST) $$newest | uniq); do \
	  $(MAKE) --no-print-directory VENV=.venv-compat/$$version TORCH=$$version .torch || failed+=" $$version"; \
	done; \
	echo "compat: oldest torch $(OLDEST), newest torch $$newest$$([[ $$newest != $(OLDEST) ]] || echo ", which is the same"), failed on:$${failed:- none}"; \
	[[ -z $$failed ]]

.PHONY: .torch
.torch: setup
	$(BIN)/uv pip install --quiet $(COMPILE) --python $(BIN)/python torch==$(TORCH)
	$(call pytest,torch-internals-$(TORCH)) $(wildcard tests/trainer/test_torch_internals.py tests/trainer/*/test_torch_internals.py) -n 0
	@echo "pytest, tests marked processes, torch $(TORCH)"; $(call pytest,processes-$(TORCH)) $(call marked,processes) -m "processes and not (chaos or e2e or acceptance)" -n $(JOBS) --dist=worksteal $(ARGS)

lint: setup ## Check format, style, types, who imports whom, and that no code is dead
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/vulture

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Measure kdist next to its peers (prints only; never decides whether a test passes)
	@for measure in startup commands step cost recovery checkpoint; do $(BIN)/python -m bench.$$measure; done

# How long `make soak` disturbs trainings; the same command goes on after it was stopped.
MINUTES ?= 30

soak: setup ## Disturb trainings for MINUTES=30 and print what they held and how fast they were; resumable, rows in .kdist/soak
	$(BIN)/python -m bench.soak --minutes $(MINUTES) $(ARGS)

docs: setup ## Write the generated reference again and build the site into build/docs
	$(BIN)/python -m tools.reference
	$(BIN)/sphinx-build -b html -E -W --keep-going -n -q -d build/doctrees docs build/docs

generate: setup ## Write all texts that are made from code again: reference pages, schemas, chart, dashboards, golden files; read the diff
	$(BIN)/python -m tests.charts.rights_files
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.dashboards export
	$(BIN)/python -m tests.charts.chart_page
	$(BIN)/python -m kdist explain -o crd > charts/kdist/crd/trainingjobs.yaml
	KDIST_REGENERATE=1 $(BIN)/python -m pytest -q -n $(JOBS) -m "not (chaos or e2e or acceptance)" -k "not test_cells or table" \
	  $$(grep -rl 'environ.get("KDIST_REGENERATE")' tests) $(ARGS)

pictures: setup ## Redraw the dashboards of real trainings into docs/, with Chromium (takes ten minutes)
	@for picture in job fleet; do $(BIN)/python -m tests.charts.pictures $$picture; done

lock: setup ## Resolve requirements.txt, and the images' parts of it, again: exact versions with hashes, no index address
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	  --all-extras --group pyproject.toml:dev --group pyproject.toml:bench --group pyproject.toml:docs \
	  --no-emit-package kdist-trainer --no-emit-package kdist \
	  --output-file requirements.txt $(ARGS) cli/pyproject.toml controller/pyproject.toml trainer/pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	  --extra torch --extra tensorboard --extra buckets --extra hub --constraint requirements.txt --output-file trainer/requirements.txt trainer/pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	  --no-emit-package kdist-trainer --no-emit-package kdist --constraint requirements.txt \
	  --output-file controller/requirements.txt controller/pyproject.toml

clean: ## Remove what make has made here: .venv, caches, test reports (never the runs in .kdist)
	rm -rf $(VENV) .venv-compat .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build .kdist/tiers .kdist/chaos-passed
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
