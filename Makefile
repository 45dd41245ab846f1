# engram. `make help` lists the commands; `make up` and `make test` need nothing but Python 3.11+ and git.

.DEFAULT_GOAL := help
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.PHONY: help up demo verify-unified test test-only lint format soak mutants conformance kafka bench docs lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

up: $(VENV)/run.stamp ## Install what is needed and run everything on this machine
	@$(BIN)/engram up

demo: $(VENV)/run.stamp ## Show a write surviving a dead memory server, on a throw-away folder
	@$(BIN)/engram demo

verify-unified: $(VENV)/run.stamp ## Ask the gate; VERIFY_FULL=1 also tests a failing memory server
	@$(BIN)/engram verify $(if $(filter 1 true yes,$(VERIFY_FULL)),--full)

test: lint test-only ## Install what is needed, check the code, run the tests

test-only: $(VENV)/dev.stamp
	@$(BIN)/python tests/support/node.py install
	@$(BIN)/python tests/support/kafka.py install
	@$(BIN)/python tests/support/subversion.py
	$(BIN)/python -m pytest -n 3 --dist loadgroup

lint: $(VENV)/dev.stamp ## Style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache | tail -8

format: $(VENV)/dev.stamp ## Rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(VENV)/dev.stamp ## The fault and load tests at full size (ENGRAM_TEST_SCALE to choose)
	ENGRAM_TEST_SCALE=$${ENGRAM_TEST_SCALE:-25} $(BIN)/python -m pytest -n 2 --dist loadgroup --timeout 3600

mutants: $(VENV)/dev.stamp ## Sabotage the code line by line; every sabotage must be noticed
	$(BIN)/python tests/run_mutants.py

conformance: $(VENV)/dev.stamp ## Run the MCP suite and write the table of docs/conformance.md
	cd tests && $(CURDIR)/$(BIN)/python -m conformance.document

kafka: $(VENV)/dev.stamp ## Run a Kafka broker on 127.0.0.1:9092 to try INGEST_QUEUE=kafka (needs Java and Maven)
	$(BIN)/python tests/support/kafka.py

bench: $(VENV)/dev.stamp ## Measure against bare scripts; prints ratios
	$(BIN)/python -m benchmarks

docs: $(VENV)/dev.stamp ## Write docs/reference/ anew, from the code
	$(BIN)/python docs/generate.py

LOCK := uv pip compile -q --universal --python-version 3.11 --no-emit-index-url --generate-hashes --no-header --no-annotate

lock: ## Choose versions anew (needs uv); hashes only, no addresses
	$(LOCK) pyproject.toml --group build -o requirements/run.txt
	$(LOCK) pyproject.toml --group dev -o requirements/dev.txt
	$(LOCK) --group pyproject.toml:rivals -o requirements/rivals.txt
	$(MAKE) $(VENV)/dev.stamp
	$(BIN)/python tests/support/node.py

clean: ## Remove what was installed here (not your data)
	rm -rf $(VENV)

# The last thing that a new environment gets: one that was cut off half-way is made again.
$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "engram needs Python 3.11 or later on PATH"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "this Python cannot make a virtual environment; trying Debian's package"; \
		apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(VENV); }

$(VENV)/run.stamp: requirements/run.txt pyproject.toml | $(BIN)/pip
	@echo "installing engram into $(VENV) (about half a minute the first time)"
	@$(PIP) install --quiet --require-hashes -r requirements/run.txt
	@$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/dev.stamp: requirements/dev.txt pyproject.toml | $(BIN)/pip
	@echo "installing engram and its tests into $(VENV) (about half a minute the first time)"
	@$(PIP) install --quiet --require-hashes -r requirements/dev.txt
	@$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@ $(VENV)/run.stamp
