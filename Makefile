# Two commands are all: `make run` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: run test lint clean

run: $(VENV)/.run
	$(BIN)/python run.py $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# One install for the program, a second one on top of it for tests and lint; each again when its inputs change.
$(VENV)/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,dev]"
	touch $@

clean:
	rm -rf $(VENV) outputs *.egg-info
