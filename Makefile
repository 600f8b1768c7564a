# Each target sets up its environment. A stamp is newer than the files that define the environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# RUNTIME: the dependencies of elasticlib. STAMP: also the tools for development.
RUNTIME := $(VENV)/runtime
STAMP := $(VENV)/installed
# The frameworks have an environment of their own, because they require other versions.
VENV_INTEGRATIONS := .venv-integrations
STAMP_INTEGRATIONS := $(VENV_INTEGRATIONS)/installed
INTEGRATIONS := tests/integrations
# The newest torch, which pip installs if no version is given, has its own environment as well.
VENV_NEWEST := .venv-newest
STAMP_NEWEST := $(VENV_NEWEST)/installed
NEWEST := tests/newest
# The tests whose results depend on the version of torch. NEWEST_TESTS=tests runs all tests.
NEWEST_TESTS ?= tests/checkpoint/test_supported_states.py tests/checkpoint/test_restore_on_all_ranks.py \
	tests/checkpoint/test_single_file.py tests/checkpoint/test_sharded_checkpoints.py \
	tests/data/test_batch_sampler.py tests/data/test_sampler.py tests/data/test_stateful_loader.py \
	tests/examples/test_in_place.py \
	tests/faults/test_recovery.py tests/logical/test_logical_workers.py \
	tests/launch/test_migrate_from_torchrun_page.py tests/launch/test_torch_fields.py \
	tests/launch/test_torchrun_flags.py tests/launch/test_torchrun_features.py \
	tests/in_place tests/workers tests/test_migrate_from_torch_elastic.py
# The run-time dependencies only, so without NumPy, and what the tests need.
VENV_BARE := .venv-bare
STAMP_BARE := $(VENV_BARE)/installed
TESTERS := pytest pytest-timeout pytest-xdist hypothesis
# The tests whose results depend on optional packages.
BARE := tests/faults/test_recovery.py tests/checkpoint/test_restore_on_all_ranks.py \
	tests/checkpoint/test_manager.py tests/data/test_sampler.py
# One process runs all tests of a file, which share fixtures. Files that take long are first.
BY_FILE := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
FAST := not (processes or long or release)

# With this variable, each of the many processes that tests start compiles elasticlib again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo picture test test-processes test-long test-bare test-integrations test-newest test-busy \
	test-pythons resolve-pythons release-check lint types notebooks docs bench bench-integrations \
	soak clean

help:
	@echo "make test       tests of one process or a few: about nine minutes on two cores"
	@echo "make lint       ruff: rules and format"
	@echo "make types      mypy --strict"
	@echo "make docs       build the documentation into build/docs; warnings are errors"
	@echo "make demo       a training job that loses workers and nodes: half a minute"
	@echo "make test-processes  real jobs: workers, agents and stores are killed and disconnected"
	@echo "make test-long  jobs between hosts (network namespaces), the demo, more examples of properties"
	@echo "make test-bare  real processes with the run-time dependencies only, without NumPy"
	@echo "make test-integrations  frameworks and schedulers, in an environment of their own"
	@echo "make test-newest   the tests that depend on torch, with the newest torch"
	@echo "make test-gpu   the tests that need a GPU"
	@echo "make test-busy  make test and make test-processes under load"
	@echo "make test-pythons  set up and run the demo on each installed Python"
	@echo "make resolve-pythons  the same, but for other Pythons only check what pip finds"
	@echo "make release-check  the checks before a release: hours"
	@echo "make notebooks  run the notebooks"
	@echo "make picture    run the jobs that the README and docs/guide/output.md show, and draw them"
	@echo "make bench      run the benchmarks, and write docs/benchmarks.md: twenty minutes"
	@echo "make bench-integrations, make bench-gpu  benchmarks of frameworks, and on a GPU"
	@echo "make soak       a training job under random faults: FAULTS=20, SEED=0, CAMPAIGN=file"
	@echo "make clean      remove .venv and everything that was built or cached"

$(RUNTIME): setup.cfg pyproject.toml constraints.txt
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable .
	@touch $@

$(STAMP): $(RUNTIME)
	@echo "setting up $(VENV) for development"
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(RUNTIME)
	@$(BIN)/python -m elasticlib.examples.demo

picture: $(RUNTIME)
	@$(BIN)/python docs/making/survives.py
	@$(BIN)/python docs/making/outputs.py

test: $(STAMP)
	@$(BIN)/python -m pytest -q -n 4 $(BY_FILE) -m "$(FAST)"

test-processes: $(STAMP)
	@$(BIN)/python -m pytest -q -n 4 $(BY_FILE) -m processes

test-long: $(STAMP)
	@$(BIN)/python -m pytest -q -n 4 $(BY_FILE) -m "long and not release"
	@$(BIN)/python -m pytest -q -n 2 $(BY_FILE) -m "hypothesis and $(FAST)" --hypothesis-profile many

BUSY ?= 3

test-busy: $(STAMP)
	@$(BIN)/python tests/under_load.py $(BUSY) $(MAKE) --no-print-directory test test-processes

release-check: test-busy test-pythons $(STAMP_INTEGRATIONS)
	@$(BIN)/python -m pytest -q -m release
	@$(VENV_INTEGRATIONS)/bin/python -m pytest -q -m release $(INTEGRATIONS)
	@$(BIN)/python -m pytest -q -n 2 tests/rendezvous/test_simulation.py --seeds 10000 --timeout 3600
	@$(MAKE) --no-print-directory test-newest NEWEST_TESTS=tests
	@$(MAKE) --no-print-directory soak FAULTS=500

$(STAMP_BARE): setup.cfg pyproject.toml constraints.txt
	@echo "setting up $(VENV_BARE)"
	@$(PYTHON) -m venv $(VENV_BARE)
	@$(VENV_BARE)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable . $(TESTERS)
	@touch $@

test-bare: $(STAMP_BARE)
	@$(VENV_BARE)/bin/python -m pytest -q -n 4 $(BY_FILE) -m "not (long or release)" $(BARE)

$(STAMP_INTEGRATIONS): setup.cfg pyproject.toml $(INTEGRATIONS)/constraints.txt
	@echo "setting up $(VENV_INTEGRATIONS)"
	@$(PYTHON) -m venv $(VENV_INTEGRATIONS)
	@$(VENV_INTEGRATIONS)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint $(INTEGRATIONS)/constraints.txt --editable '.[integrations]'
	@touch $@

test-integrations: $(STAMP_INTEGRATIONS)
	@$(VENV_INTEGRATIONS)/bin/python -m pytest -q -n 4 $(BY_FILE) -m "not release" $(INTEGRATIONS)

$(STAMP_NEWEST): setup.cfg pyproject.toml constraints.txt $(NEWEST)/constraints.txt
	@echo "setting up $(VENV_NEWEST)"
	@$(PYTHON) -m venv $(VENV_NEWEST)
	@grep -v '^torch==' constraints.txt > $(VENV_NEWEST)/constraints.txt
	@$(VENV_NEWEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint $(VENV_NEWEST)/constraints.txt --constraint $(NEWEST)/constraints.txt \
		--editable '.[dev]'
	@touch $@

test-newest: $(STAMP_NEWEST)
	@$(VENV_NEWEST)/bin/python -m pytest -q -n 4 $(BY_FILE) -m "not (long or release)" \
		$(NEWEST_TESTS)

test-pythons:
	@$(PYTHON) tests/supported_pythons.py $(PYTHONS)

resolve-pythons:
	@$(PYTHON) tests/supported_pythons.py --resolve $(PYTHONS)

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	@$(BIN)/mypy --no-error-summary

notebooks: $(STAMP)
	@$(BIN)/python -m pytest -q -n 2 tests/test_notebooks.py

docs: $(STAMP)
	@$(BIN)/python docs/making/redraw.py
	@$(BIN)/python -m sphinx -W --keep-going -q -E -d build/doctrees -b html docs build/docs
	@echo "build/docs/index.html"

bench: $(STAMP)
	@$(BIN)/python tests/bench --quote

bench-integrations: $(STAMP_INTEGRATIONS)
	@$(VENV_INTEGRATIONS)/bin/python tests/bench --only frameworks

.PHONY: test-gpu bench-gpu

# GPU_TESTS_ON=cpu runs the tests that a CPU can run, too.
test-gpu: $(STAMP) $(STAMP_NEWEST)
	@$(BIN)/python -m pytest -q tests/gpu
	@$(VENV_NEWEST)/bin/python -m pytest -q tests/in_place/test_on_a_device.py

bench-gpu: $(STAMP)
	@$(BIN)/python tests/gpu/bench.py --out build/bench-gpu.json

FAULTS ?= 20
SEED ?= 0

soak: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m soak --faults $(FAULTS) --seed $(SEED) \
		$(if $(CAMPAIGN),--campaign $(CAMPAIGN)) --out build/soak

clean:
	@rm -rf docs/notebooks
	@rm -rf $(VENV) $(VENV_BARE) $(VENV_INTEGRATIONS) $(VENV_NEWEST) .venv-pythons
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
