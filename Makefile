# make run: every notebook, quick scale.  make test: lint, types, fast tests.  The rest is listed in the README.
PYTHON ?= python3.11
BIN := .venv/bin
TABLES := captured predictions tradeoff overheads largest capped

.PHONY: run test test-slow lab results bench bench-inductor $(TABLES) clean

# Installed again whenever the dependencies change; what is there already is kept.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[notebooks,dev]'
	touch $@

run: .venv/installed
	$(BIN)/python -m acwb.experiments notebooks quick

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2

test-slow: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --numprocesses 2 tests/execution/test_architectures.py
	$(BIN)/pytest -m slow --ignore tests/execution/test_architectures.py

lab: .venv/installed
	$(BIN)/jupyter lab --notebook-dir=notebooks

# What results/full holds is not measured again, and a table is there whole or not at all: it may be interrupted.
results: .venv/installed $(TABLES:%=results/full/%.csv)
	PLOTLY_RENDERER=png $(BIN)/python -m acwb.experiments notebooks full

results/full/%.csv: | .venv/installed
	$(BIN)/python -m acwb.experiments table $*

bench bench-inductor $(TABLES): .venv/installed
	$(BIN)/python -m acwb.experiments table $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
