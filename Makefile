# `make run` shows the engine at work, `make test` runs every check. Both set up their own virtual environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test format format-check lint types tests clean

run: $(VENV)/.run
	$(BIN)/infinilm generate --chat --max-tokens 64 \
		"What is the capital of France, and what is it known for?" \
		"Write a haiku about the sea." \
		"Explain in two sentences why the sky is blue."

test: format-check lint types tests

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: $(VENV)/.dev
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

tests: $(VENV)/.dev
	$(BIN)/python -m pytest

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("InfiniLM needs Python 3.11 or 3.12; set PYTHON=…" if not (3, 11) <= sys.version_info[:2] <= (3, 12) else 0)'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) …"
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Installing the test tools into $(VENV) …"
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
