# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up its own .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable

.PHONY: demo test test-all lint format docs dist bench clean

demo: $(VENV)/.ready-core
	$(BIN)/vitrail demo --force
	@echo "The command vitrail is in $(VENV): . $(BIN)/activate"

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-all: lint $(VENV)/.ready-notebooks $(VENV)/.ready-dist
	$(BIN)/python -m pytest

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check
	$(BIN)/lint-imports

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/layers.py
	$(BIN)/python docs/notes.py

# Opens with site/index.html, from disk and without network; Korean in site/ko.
docs: $(VENV)/.ready-docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d $(VENV)/.doctrees/en . site
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d $(VENV)/.doctrees/ko -t ko . site/ko

# dist/vitrail-*.whl and dist/vitrail-*.tar.gz
dist: $(VENV)/.ready-dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build

bench: $(VENV)/.ready-bench
	$(BIN)/python benchmarks/forward.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/pages.py
	$(BIN)/python benchmarks/images.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/train.py

clean:
	rm -rf $(VENV) site dist docs/api

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "vitrail needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing vitrail and its extras into $(VENV): the first time takes some minutes, mostly for torch."
	$(INSTALL) ".[all]"
	@touch $@

$(VENV)/.ready-test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) ".[test]"
	@touch $@ $(VENV)/.ready-core

$(VENV)/.ready-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) ".[docs]"
	@touch $@ $(VENV)/.ready-core

$(VENV)/.ready-notebooks: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) ".[notebooks]"
	@touch $@ $(VENV)/.ready-docs $(VENV)/.ready-core

$(VENV)/.ready-dist: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) ".[dist]"
	@touch $@

$(VENV)/.ready-bench: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) ".[bench]"
	@touch $@ $(VENV)/.ready-test $(VENV)/.ready-core
