# Two commands do everything: `make quickstart` and `make test`. Each makes .venv first if it is not there or is out of date.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is kept: compiling torch's modules anew takes as long as importing them, at every start.
unexport PYTHONDONTWRITEBYTECODE
# uv looks where pip is told to look (PIP_FIND_LINKS), so a local torch build is found.
INSTALL := UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt

# What failed beside other tests is asked once more, alone: a busy machine is no defect, one that fails twice is.
AGAIN := $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none

.PHONY: quickstart test test-all lint docs docs-version bench dist clean

quickstart: $(VENV)/.train
	$(BIN)/python examples/quickstart/run.py $(ARGS)

test: lint
	$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m "not slow" || $(AGAIN)

# Everything: the slow tests too, and as many examples of each property as its test asks for.
test-all: lint
	$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder --hypothesis-profile full || $(AGAIN) --hypothesis-profile full

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --summary=none
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs serve

# The manual of this version beside those that are in site/ already, with a menu to switch.
docs-version: $(VENV)/.dev
	$(BIN)/python docs/versions.py

bench: $(VENV)/.dev
	$(INSTALL) -e '.[peers]'
	$(BIN)/python benchmarks/control_cpu.py

$(VENV)/bin/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt uv

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/uv
	$(INSTALL) -e '.[train]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/uv
	$(INSTALL) -e '.[dev]'
	touch $(VENV)/.train $@

# What a release consists of: the wheel, its sources and the manual.
dist: $(VENV)/.dev
	$(INSTALL) build
	$(BIN)/python -m build --installer uv --outdir dist
	$(BIN)/mkdocs build

clean:
	rm -rf $(VENV) site dist
