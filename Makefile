# Everything on a fresh machine: each target makes what it needs. Python 3.11 or newer is the only thing to bring.
PYTHON ?= python3
VENV := .venv
RUN := PYTHONSAFEPATH=1 PYTHONWARNINGS= $(VENV)/bin/
WORK ?= work
LOG ?= sqlite

.PHONY: demo test test-all test-broker lint setup clean help

help:
	@echo "make demo      the whole loop once on a real small model, into $(WORK)/; LOG=kafka: over a broker it starts"
	@echo "make test      lint, types, import rules and the test suite"
	@echo "make test-all  the same with the slow tests"
	@echo "make test-broker  the tests on a real Apache Kafka (Java 17; jars: DRAFTLOOP_KAFKA_LIBS, KAFKA_HOME or broker fetch)"
	@echo "make clean     remove .venv and $(WORK)/"

setup: $(VENV)/ready

# torch first: pinned, so that pip takes the CPU wheel; DeepSpeed's build looks for it.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools wheel
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,mlflow,kafka,demo,bench,dev]'
	touch $@

demo: setup
	$(RUN)draftloop demo work=$(WORK) log=$(LOG)

lint: setup
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)lint-imports

test: lint
	$(RUN)python -m pytest -m "not slow and not engine and not broker and not gpu"

test-all: lint
	$(RUN)python -m pytest -m "not engine and not broker and not gpu"

test-broker: setup
	$(RUN)python -m pytest -m broker

clean:
	rm -rf $(VENV) $(WORK)
