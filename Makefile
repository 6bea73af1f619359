# Everything on a fresh machine: each target makes what it needs. Python 3.11 or newer is the only thing to bring.
PYTHON ?= python3
VENV := .venv
RUN := PYTHONSAFEPATH=1 PYTHONWARNINGS= $(VENV)/bin/
WORK ?= work

.PHONY: demo test test-all lint setup clean help

help:
	@echo "make demo      the whole loop once on a real small model, into $(WORK)/"
	@echo "make test      lint, types, import rules and the test suite"
	@echo "make test-all  the same with the slow tests"
	@echo "make clean     remove .venv and $(WORK)/"

setup: $(VENV)/ready

# torch first: pinned, so that pip takes the CPU wheel; DeepSpeed's build looks for it.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools wheel
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,mlflow,demo,dev]'
	touch $@

demo: setup
	$(RUN)draftloop demo work=$(WORK)

lint: setup
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)lint-imports

test: lint
	$(RUN)python -m pytest -m "not slow and not engine and not broker and not gpu"

test-all: lint
	$(RUN)python -m pytest -m "not engine and not broker and not gpu"

clean:
	rm -rf $(VENV) $(WORK)
