# Two commands are all: `make run` and `make test`. Both create .venv and install what they need. `make docs` builds the site,
# `make check` runs for hours what is too long for `make test`, `make figures` measures again what docs/figures.md shows.
# `make test TORCH=2.11.0` tests with another torch than constraints.txt pins, PYTHON=python3.12 with another Python; each pair
# of them has an environment of its own.
PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch$(TORCH))$(if $(filter-out python3,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
ARGS ?=

COMPILED := $(shell find gpp -name '*.pxd')
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# What is installed is compiled by all cores at once; pip would compile one file after the other, tests included.
# Of the models of transformers, a fifth of all, and of torch's compiler few are ever imported, and nothing of pandas and scikit-learn.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(PINS)
COMPILE = $(BIN)/python -m compileall -q -j 0 -x '/tests?/|/testing/|/transformers/models/|/_inductor/|/lexers/|/(pandas|sklearn)/' $(VENV)/lib || true

# Where this is set, every process of a test compiles all that it imports, again and again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check lint docs figures lock clean

run: $(VENV)/.run
	$(BIN)/python run.py $(or $(ARGS),experiment=side_by_side)

# All processes of the tests import the same modules, so they are compiled before; test files are pytest's to compile.
test: $(VENV)/.test
	@$(BIN)/python -m compileall -q -j 0 -x '/test_[^/]*$$' gpp baselines sweeps tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# The checks that are too long for the tests, the tests marked `long` among them, one after another; `make check ARGS="kills serving"` for these two.
check: $(VENV)/.test
	$(BIN)/python -m tests.checks $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The pages of docs/ as a site in site/; a link that leads nowhere, or a page that the navigation lacks, ends it.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every number of docs/figures.md again, by its command: hours. ARGS="--only NAME" for one.
figures: $(VENV)/.test
	$(BIN)/python -m sweeps.figures $(ARGS)

# Each is one install, the tests' too, which holds the program's; again when its inputs change.
# The package is built, most of it by a compiler, while pip fetches what it needs.
$(VENV)/.test: EXTRAS := test dev
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.run $(VENV)/.test $(VENV)/.docs: pyproject.toml constraints.txt setup.py $(COMPILED) $(COMPILED:.pxd=.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(PINS))
	$(BIN)/python tests/support/requirements.py $(EXTRAS) > $(VENV)/needed.txt
	$(PIP) --no-deps -e . & built=$$!; $(PIP) -r $(VENV)/needed.txt; fetched=$$?; wait $$built && exit $$fetched
	@$(COMPILE)
	touch $(VENV)/.run $@

# Every package of a user's installation with its hashes, from pyproject.toml and constraints.txt; needs uv.
lock:
	uv pip compile pyproject.toml --extra all -c constraints.txt --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-annotate --no-header --quiet -o requirements.lock

clean:
	rm -rf .venv .venv-* outputs site *.egg-info
