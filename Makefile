# Each target sets itself up: the stamp below stands for a .venv that holds what the files name.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the demo needs, torch and little else; and then all that development needs besides.
RUNTIME := $(VENV)/runtime
STAMP := $(VENV)/installed
# The frameworks have an environment of their own, as their versions are not ours to choose.
VENV_INTEGRATIONS := .venv-integrations
STAMP_INTEGRATIONS := $(VENV_INTEGRATIONS)/installed
INTEGRATIONS := tests/integrations
# So has the newest torch, which is what pip gives to whoever pins nothing.
VENV_NEWEST := .venv-newest
STAMP_NEWEST := $(VENV_NEWEST)/installed
NEWEST := tests/newest
# What can differ there: what is saved and dealt with torch's own, its names and flags, and
# one job that loses workers. NEWEST_TESTS=tests runs all.
NEWEST_TESTS ?= tests/checkpoint/test_accepted.py tests/checkpoint/test_restore_on_all_ranks.py \
	tests/checkpoint/test_single_file.py tests/checkpoint/test_sharded_checkpoints.py \
	tests/data/test_batch_sampler.py tests/data/test_sampler.py tests/data/test_stateful_loader.py \
	tests/examples/test_in_place.py \
	tests/faults/test_recovery.py tests/logical/test_logical_workers.py \
	tests/launch/test_migrate_from_torchrun_page.py tests/launch/test_torch_fields.py \
	tests/launch/test_torchruns_flags.py tests/launch/test_torchruns_promises.py \
	tests/in_place tests/workers tests/test_migrate_from_torch_elastic.py
# What a user has who installs elasticlib and nothing else: no NumPy, above all. And what tests need.
VENV_BARE := .venv-bare
STAMP_BARE := $(VENV_BARE)/installed
TESTERS := pytest pytest-timeout pytest-xdist hypothesis
# There, a start of workers, a recovery, a checkpoint and a sampler differ; what is decided does not.
BARE := tests/faults/test_recovery.py tests/checkpoint/test_restore_on_all_ranks.py \
	tests/checkpoint/test_manager.py tests/data/test_sampler.py
# What the tests of a file share is started once, and the long files first.
BY_FILE := --dist loadfile --no-loadscope-reorder
DAY := not (processes or long or release)

.PHONY: help demo picture test test-processes test-long test-bare test-integrations test-newest test-busy \
	test-pythons resolve-pythons release-check lint types notebooks docs bench bench-integrations \
	soak clean

help:
	@echo "make demo       a training job that survives: half a minute"
	@echo "make picture    runs the jobs of the README's picture and of docs/guide/output.md, and draws them"
	@echo "make test       what a person runs all day: three minutes on two cores"
	@echo "make test-processes  real jobs: workers, agents and stores are killed, stopped and cut off"
	@echo "make test-long  jobs between hosts (network namespaces), the demo, many drawn examples"
	@echo "make test-bare  real processes where only run-time dependencies are: no NumPy"
	@echo "make test-integrations  under real frameworks and schedulers, in an environment of their own"
	@echo "make test-newest   what touches torch, on the newest one, in an environment of its own"
	@echo "make test-busy  test and test-processes beside three processes that are always busy"
	@echo "make release-check  soak, busy machines, 10,000 seeds and nodes, what is marked release: hours"
	@echo "make test-pythons  sets up and runs the demo on each Python that is at hand"
	@echo "make resolve-pythons  the same, but pip alone looks for what the other Pythons need"
	@echo "make lint       ruff: rules and format"
	@echo "make types      mypy --strict"
	@echo "make notebooks  run the notebooks"
	@echo "make docs       build the documentation into build/docs; warnings are errors"
	@echo "make bench      measure everything beside torch: docs/benchmarks.md (twenty minutes)"
	@echo "make test-gpu   what needs a GPU, on one; make bench-gpu measures there: build/bench-gpu.json"
	@echo "make soak       a training job under drawn faults: FAULTS=20, SEED=0, CAMPAIGN=file"
	@echo "make clean      remove .venv and all that was built or cached"

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
	@$(BIN)/python -m pytest -q -n 4 $(BY_FILE) -m "$(DAY)"

test-processes: $(STAMP)
	@$(BIN)/python -m pytest -q -n 4 $(BY_FILE) -m processes

test-long: $(STAMP)
	@$(BIN)/python -m pytest -q -n 4 $(BY_FILE) -m "long and not release"
	@$(BIN)/python -m pytest -q -n 2 $(BY_FILE) -m "hypothesis and $(DAY)" --hypothesis-profile many

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

# With GPU_TESTS_ON=cpu, what of it a CPU can show.
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
	@rm -rf docs/notebooks docs/reference/made
	@rm -rf $(VENV) $(VENV_BARE) $(VENV_INTEGRATIONS) $(VENV_NEWEST) .venv-pythons
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
