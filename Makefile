# make run: every notebook, quick scale.  make check: lint, types, torch-free tests.  make test: all fast tests.
# The rest is listed in the README.
PYTHON ?= python3.11
BIN := .venv/bin
TABLES := captured predictions tradeoff overheads largest capped

.PHONY: run lint torch-free fast check test test-slow audit fuzz lab results page bench bench-inductor $(TABLES) clean

# Installed again whenever the dependencies change; what is there already is kept.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[notebooks,dev]'
	touch $@

run: .venv/installed
	$(BIN)/python -m acwb.experiments notebooks quick

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

torch-free: .venv/installed
	$(BIN)/pytest --numprocesses 2 -m 'not slow and not torch' \
	  tests/core tests/planning tests/test_files.py tests/test_layers.py tests/test_units.py tests/test_value_checks.py

fast: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2

# On a fresh clone, types take a minute of one core: they are checked beside the tests.
check: .venv/installed
	$(MAKE) --no-print-directory --jobs 2 lint torch-free

test: .venv/installed
	$(MAKE) --no-print-directory --jobs 2 lint fast

# Small models beside the notebooks, with a core each; then real models, alone, for their memory, and the timed browser.
PARALLEL := tests/capture/test_op_audit.py tests/execution/test_architectures.py tests/experiments/test_notebooks.py \
  tests/fuzz
test-slow: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --numprocesses 2 --dist loadgroup $(PARALLEL)
	$(BIN)/pytest -m slow $(PARALLEL:%=--ignore %)

# Every op of ATen that PyTorch has samples of, against the memory that a capture says it needs.
audit: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --numprocesses 2 tests/capture/test_op_audit.py

# Random models, losses and optimizers, as step and as drop-in, until the time is up; prints the seeds that do not hold.
SECONDS := 600
SEED := 0
fuzz: .venv/installed
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -W ignore -m fuzz $(SECONDS) $(SEED)

lab: .venv/installed
	$(BIN)/jupyter lab --notebook-dir=notebooks

# What results/full holds is not measured again, and a table is there whole or not at all: it may be interrupted.
results: .venv/installed $(TABLES:%=results/full/%.csv)
	PLOTLY_RENDERER=png $(BIN)/python -m acwb.experiments notebooks full
	$(BIN)/python -m acwb.experiments page

results/full/%.csv: | .venv/installed
	$(BIN)/python -m acwb.experiments table $*

# results/README.md and the table of results in the README, from the files of results/full.
page: .venv/installed
	$(BIN)/python -m acwb.experiments page

bench bench-inductor $(TABLES): .venv/installed
	$(BIN)/python -m acwb.experiments table $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
