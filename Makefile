# make run: every notebook, quick scale.  make test: lint, types, fast tests.  The rest is listed in the README.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: run test test-slow lab results bench predictions overheads tradeoff clean

# Installed again whenever the dependencies change; what is there already is kept.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[notebooks,dev]'
	touch $@

run: .venv/installed
	@echo "There are no notebooks yet: they come with the workbench. Captured and eager steps side by side: make bench"

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

test-slow: .venv/installed
	$(BIN)/pytest -m slow

lab: .venv/installed
	@echo "There are no notebooks to open yet: they come with the workbench."

results: .venv/installed
	@echo "There are no full-scale results yet: they come with the notebooks."

bench: .venv/installed
	$(BIN)/python -m acwb.bench

predictions: .venv/installed
	$(BIN)/python -m acwb.bench predictions

overheads: .venv/installed
	$(BIN)/python -m acwb.bench overheads

tradeoff: .venv/installed
	$(BIN)/python -m acwb.tradeoff

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
