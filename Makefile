# The two commands are `make verify` and `make test`. They need a Python from 3.11 to 3.13 with pip, and nothing else.
# PYTHON chooses the interpreter of the virtual environment: `make verify PYTHON=python3.12`. CONSTRAINTS names another
# file of versions; `make verify CONSTRAINTS=` takes the newest of each.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(addprefix -c ,$(CONSTRAINTS))
TESTS := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=80 --durations-min=4

export OMP_NUM_THREADS := 1

# What is installed is remembered in $(VENV)/with-<extra>, which is older than these two once they change.
NEEDS := pyproject.toml $(CONSTRAINTS)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help verify test test-all oracles lint types imports two-notebooks notebooks pages docs sizes browser bench bugs beliefs mutants tiers alarms failures line-types peers clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 15

verify: $(VENV)/with-verify $(VENV)/with-hf ## verify the schemes of public functions on this CPU, real text and three injected bugs
	$(BIN)/shardproof tour

test: $(VENV)/with-test $(VENV)/with-oracles ## run the fast tests on two processes
	$(TESTS) -m "not slow" --hypothesis-profile=fast --ignore=parity_tests/test_notebooks.py --junitxml=build/tests.xml

test-all: $(VENV)/with-test $(VENV)/with-oracles ## run all tests, with more examples
	$(TESTS) --hypothesis-profile=ci --junitxml=build/all-tests.xml

oracles: $(VENV)/with-oracles ## install what some tests compare with, built without CUDA

lint: $(VENV)/with-test ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/with-test ## basedpyright
	$(BIN)/basedpyright --pythonpath $(BIN)/python

imports: $(VENV)/with-test ## the contracts between packages
	$(BIN)/lint-imports

two-notebooks: $(VENV)/with-test $(VENV)/with-notebooks ## execute two notebooks and compare them with what is committed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" parity_tests/test_notebooks.py

notebooks: $(VENV)/with-test $(VENV)/with-notebooks ## execute all notebooks and compare them with what is committed
	$(BIN)/python -m pytest -n 2 --dist worksteal parity_tests/test_notebooks.py

pages: $(VENV)/with-docs ## build the pages into docs/_build without executing their cells
	$(BIN)/python docs/images.py $(PICTURES)
	$(BIN)/python -m sphinx -W --keep-going -q -j 2 -b html -D nb_execution_mode=off -D suppress_warnings=myst-nb.lexer docs docs/_build/html

docs: $(VENV)/with-docs ## build the pages into docs/_build, their cells and pictures anew
	$(BIN)/python docs/images.py $(PICTURES)
	$(BIN)/python -m sphinx -W --keep-going -q -j 2 -b html docs docs/_build/html

sizes: $(VENV)/with-test $(VENV)/with-notebooks $(VENV)/with-docs ## count the installed packages of each extra and write them into docs/how-to/install.md
	$(BIN)/python docs/installed_sizes.py

browser: $(VENV)/with-docs ## open the built pages in Chromium at three widths, light and dark
	$(BIN)/python docs/in_a_browser.py

bench: $(VENV)/with-test $(VENV)/with-bench ## measure the promised figures and write docs/benchmarks.md
	$(BIN)/python -m parity_tests.evidence.benchmarks

bugs: $(VENV)/with-test ## inject every bug of the catalogue and count what is caught
	$(BIN)/python -m parity_tests.evidence.injected_bugs --jobs 2 --page docs --table build/injected_bugs.md

beliefs: $(VENV)/with-test $(VENV)/with-oracles ## judge the wrong beliefs and write docs/beliefs.md; it goes on where it was stopped
	$(BIN)/python -m parity_tests.evidence.beliefs --page docs/beliefs.md

mutants: $(VENV)/with-test $(VENV)/with-oracles ## judge 1,120 sampled mutants and write docs/mutants.md; it goes on where it was stopped
	$(BIN)/python -m parity_tests.evidence.mutants --page docs/mutants.md
	$(BIN)/python -m parity_tests.evidence.mutants.equivalents --page docs/mutants.md

tiers: $(VENV)/with-test $(VENV)/with-oracles ## count the bugs that `make test` catches of those that `make test-all` catches
	$(BIN)/python -m parity_tests.evidence.mutants.tiers --page docs/tiers.md

alarms: $(VENV)/with-test ## judge 100,000 drawn examples of what is right and write docs/false-alarms.md; it goes on where it was stopped
	$(BIN)/python -m parity_tests.evidence.false_alarms --page docs/false-alarms.md

failures: $(VENV)/with-test ## run every kind of failure on every engine and write docs/failures.md and docs/failures.json
	$(BIN)/python -m parity_tests.evidence.failures --page docs/failures.md

line-types: $(VENV)/with-test $(VENV)/with-types ## type all schemes and a sample of injected bugs and write docs/line-types.md; it goes on where it was stopped
	$(BIN)/python -m parity_tests.evidence.line_types
	$(BIN)/python -m pytest -q parity_tests/harness/line_types

peers: $(VENV)/with-test $(VENV)/with-peers ## judge other projects' functions and write docs/findings.md
	$(BIN)/python -m parity_tests.evidence.peers

clean: ## remove what the other targets made, the virtual environment included
	rm -rf $(VENV) build dist docs/_build docs/notebooks docs/gallery.md docs/images/gallery docs/jupyter_execute .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	rm -f replay_*.py replay_*.pkl shardproof_verify.png $(foreach name,spec schedule crossovers tour,docs/images/$(name).svg docs/images/$(name)-dark.svg)
	find torch_impl jax_ref parity_tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"shardproof needs Python 3.11 to 3.13, $(PYTHON) is %d.%d; make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)

# mamba-ssm and causal-conv1d without CUDA, for their functions in plain torch. They build with the torch that is
# there, and what else they ask for serves their kernels, of which triton alone is used here.
$(VENV)/with-oracles: $(NEEDS) | $(VENV)/with-test
	$(PIP) setuptools wheel
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE \
		$(PIP) --no-build-isolation --no-deps mamba-ssm causal-conv1d
	@touch $@

# Other projects, as the gallery of findings calls them: on the torch that is there, whichever they ask for.
$(VENV)/with-peers: $(NEEDS) | $(VENV)/with-test
	$(PIP) -e '.[peers]'
	$(PIP) --no-deps megatron-core deepspeed colossalai fairscale yunchang galore-torch bitsandbytes peft accelerate \
		nemo-automodel verl diffusers torchtitan fla-core flash-linear-attention
	@touch $@

$(VENV)/with-%: $(NEEDS) | $(VENV)/bin/python
	$(PIP) -e '.[$*]'
	@touch $@
