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
NEWEST_TESTS ?= tests/checkpoint tests/data tests/faults tests/launch tests/logical tests/rendezvous \
	tests/workers tests/test_coming_from_torch.py tests/test_torch_names.py
# What a user has who installs elasticlib and nothing else: no NumPy, above all. And what tests need.
VENV_BARE := .venv-bare
STAMP_BARE := $(VENV_BARE)/installed
TESTERS := pytest pytest-timeout pytest-xdist hypothesis
BARE := tests/logical/test_logical_workers.py tests/faults/test_recovery.py \
	tests/faults/test_samples.py tests/checkpoint/test_agree.py tests/checkpoint/test_manager.py \
	tests/checkpoint/test_sharded_checkpoints.py tests/checkpoint/test_wait_on_every_rank.py \
	tests/checkpoint/test_several_managers.py tests/data/test_sampler.py
# What the tests of a file share is started once, and the long files first.
BY_FILE := --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-long test-bare test-integrations test-newest test-pythons resolve-pythons \
	lint types \
	notebooks docs bench bench-integrations soak clean

help:
	@echo "make demo       a training job that survives: half a minute"
	@echo "make test       all tests but those of the next two and of notebooks, four at a time"
	@echo "make test-long  the longest: jobs between hosts (network namespaces), the demo, README's lines"
	@echo "make test-bare  tests of real processes where only run-time dependencies are: no NumPy"
	@echo "make test-integrations  under real frameworks and schedulers, in an environment of their own"
	@echo "make test-newest   the tests that touch torch, on the newest one, in an environment of its own"
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

test: $(STAMP)
	@$(BIN)/python -m pytest -q -n 4 $(BY_FILE) -m "not long"

test-long: $(STAMP)
	@$(BIN)/python -m pytest -q -n 3 $(BY_FILE) -m "long and not alone"
	@$(BIN)/python -m pytest -q -m alone tests/rendezvous tests/faults

$(STAMP_BARE): setup.cfg pyproject.toml constraints.txt
	@echo "setting up $(VENV_BARE)"
	@$(PYTHON) -m venv $(VENV_BARE)
	@$(VENV_BARE)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable . $(TESTERS)
	@touch $@

test-bare: $(STAMP_BARE)
	@$(VENV_BARE)/bin/python -m pytest -q -n 4 $(BY_FILE) $(BARE)

$(STAMP_INTEGRATIONS): setup.cfg pyproject.toml $(INTEGRATIONS)/constraints.txt
	@echo "setting up $(VENV_INTEGRATIONS)"
	@$(PYTHON) -m venv $(VENV_INTEGRATIONS)
	@$(VENV_INTEGRATIONS)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint $(INTEGRATIONS)/constraints.txt --editable '.[integrations]'
	@touch $@

test-integrations: $(STAMP_INTEGRATIONS)
	@$(VENV_INTEGRATIONS)/bin/python -m pytest -q -n 2 $(BY_FILE) $(INTEGRATIONS)

$(STAMP_NEWEST): setup.cfg pyproject.toml constraints.txt $(NEWEST)/constraints.txt
	@echo "setting up $(VENV_NEWEST)"
	@$(PYTHON) -m venv $(VENV_NEWEST)
	@grep -v '^torch==' constraints.txt > $(VENV_NEWEST)/constraints.txt
	@$(VENV_NEWEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint $(VENV_NEWEST)/constraints.txt --constraint $(NEWEST)/constraints.txt \
		--editable '.[dev]'
	@touch $@

test-newest: $(STAMP_NEWEST)
	@$(VENV_NEWEST)/bin/python -m pytest -q -n 4 $(BY_FILE) -m "not long" $(NEWEST_TESTS)

test-pythons:
	@$(PYTHON) tests/pythons.py $(PYTHONS)

resolve-pythons:
	@$(PYTHON) tests/pythons.py --resolve $(PYTHONS)

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	@$(BIN)/mypy --no-error-summary

notebooks: $(STAMP)
	@$(BIN)/python -m pytest -q -n 2 tests/test_notebooks.py

docs: $(STAMP)
	@$(BIN)/python docs/making/redraw.py
	@$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees -b html docs build/docs
	@echo "build/docs/index.html"

bench: $(STAMP)
	@$(BIN)/python tests/bench --quote

bench-integrations: $(STAMP_INTEGRATIONS)
	@$(VENV_INTEGRATIONS)/bin/python tests/bench --only frameworks

.PHONY: test-gpu bench-gpu

# With GPU_TESTS_ON=cpu, what of it a CPU can show.
test-gpu: $(STAMP)
	@$(BIN)/python -m pytest -q tests/gpu

bench-gpu: $(STAMP)
	@$(BIN)/python tests/gpu/bench.py --out build/bench-gpu.json

FAULTS ?= 20
SEED ?= 0

soak: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m soak --faults $(FAULTS) --seed $(SEED) \
		$(if $(CAMPAIGN),--campaign $(CAMPAIGN)) $(if $(UNDER),--under $(UNDER)) --out build/soak

clean:
	@rm -rf docs/notebooks docs/reference/made
	@rm -rf $(VENV) $(VENV_BARE) $(VENV_INTEGRATIONS) $(VENV_NEWEST) .venv-pythons
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
