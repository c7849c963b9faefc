# Everything here needs Python >= 3.10 and make, nothing else; PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that run tests; more than there are cores make those late that wait for something.
JOBS ?= 2
CONSTRAINTS ?= constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c $(CONSTRAINTS)

.PHONY: help demo test lint docs format clean

help:
	@echo "make demo    install into $(VENV) and find a planted fp16 overflow in a small T5"
	@echo "make test    install into $(VENV) and run the tests; ARGS='-k scope' chooses among them, JOBS=0 is one process"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the documentation, as pages for a browser: build/site/index.html"
	@echo "make format  let ruff format and fix the sources"
	@echo "make clean   remove $(VENV) and the caches"

demo: $(VENV)/.installed
	@$(BIN)/mldebug demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(VENV)/.installed-test
	@failed=0; for tool in "ruff check ." "ruff format --check ." mypy; do \
		echo "$$tool"; $(BIN)/$$tool || failed=1; \
	done; exit $$failed

docs: $(VENV)/.installed-test
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# The stamps are newer than what they were made from, so that a second call installs nothing.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "mldebug needs Python 3.10 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing into $(VENV) (the first time this downloads PyTorch)"
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing into $(VENV) (the first time this downloads PyTorch)"
	$(PIP_INSTALL) -e '.[test,dev]'
	@touch $(VENV)/.installed $@
