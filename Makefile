# Everything a person types. `make` alone says what there is.

SHELL := /bin/sh
.DEFAULT_GOAL := help
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOCKS := requirements/run.txt requirements/dev.txt requirements/torch.txt requirements/openai-oldest.txt
OLDEST_SDK := $(VENV)/openai-oldest
DATA_DIR ?= .headrace
MINUTES ?= 30
CASES ?= 2000
REQUESTS ?= 2000
ROUNDS ?= 3
ARGS ?=
# Tests at a time. Half of what they do is wait.
JOBS ?= 2

# The first Python on the path that is new enough.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif

COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --no-header --no-annotate --strip-extras \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	--unsafe-package torch --unsafe-package triton

.PHONY: help
help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: serve
serve: $(INSTALLED) ## Run the whole service here, with a demo model (ARGS="--port 9000" ...)
	@exec $(BIN)/headrace serve --data-dir $(DATA_DIR) $(ARGS)

.PHONY: test
test: lint types contracts unit ## Everything that must hold before a change is merged

.PHONY: lint
lint: $(INSTALLED) ## Style and likely mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(INSTALLED) ## Types, strictly
	$(BIN)/mypy

.PHONY: contracts
contracts: $(INSTALLED) ## Who may import whom
	$(BIN)/lint-imports

.PHONY: unit
unit: $(INSTALLED) ## The tests alone (ARGS="tests/cli -k supervisor" ...)
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

.PHONY: test-long
test-long: $(INSTALLED) ## Any schedule, for minutes or hours (MINUTES=30 ...); stops at a failure
	$(BIN)/python -m tests.engine.any_schedule_long --minutes $(MINUTES)

.PHONY: fuzz
fuzz: $(INSTALLED) ## Ask a service of its own everything that /openapi.json allows (CASES=2000 ...)
	$(BIN)/python -m tests.api.openapi_fuzz --cases $(CASES) $(ARGS)

.PHONY: test-faults
test-faults: $(INSTALLED) ## 2,000 requests while everything is killed 100 times (SEED=7 REQUESTS=... ROUNDS=...)
	$(BIN)/python -m tests.faults.loop --requests $(REQUESTS) --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

.PHONY: format
format: $(INSTALLED) ## Rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: venv
venv: $(INSTALLED) ## The Python environment, exactly as locked

$(INSTALLED): $(LOCKS) pyproject.toml setup.py $(wildcard kernels/cpu/src/*)
	@test -n "$(PYTHON)" || { echo "Headrace needs Python 3.11 or newer on the path." >&2; exit 1; }
	@echo "Installing Headrace and what it needs into $(VENV) (once; a few minutes)."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt -r requirements/run.txt
	$(BIN)/python -m pip install --quiet -r requirements/torch.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	rm -rf $(OLDEST_SDK)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --target $(OLDEST_SDK) \
		-r requirements/openai-oldest.txt
	@touch $@

.PHONY: lock
lock: $(INSTALLED) ## Bring the locks up to date with requirements/*.in (ARGS=--upgrade for all)
	$(COMPILE) $(ARGS) --output-file requirements/run.txt requirements/run.in
	$(COMPILE) $(ARGS) --output-file requirements/dev.txt requirements/dev.in
	@# What is deliberately not in the lock is no reason for a warning in it.
	@for lock in run dev; do \
		sed '/^# WARNING/,$$d' requirements/$$lock.txt > requirements/$$lock.txt.part && \
		mv requirements/$$lock.txt.part requirements/$$lock.txt; done
	@# The oldest SDK stands alone: what it needs is in dev.txt.
	$(COMPILE) $(ARGS) --output-file requirements/openai-oldest.txt requirements/openai-oldest.in
	@sed -n '/^openai==/,/[^\\]$$/p' requirements/openai-oldest.txt > requirements/openai-oldest.txt.part && \
		mv requirements/openai-oldest.txt.part requirements/openai-oldest.txt

.PHONY: clean
clean: ## Remove caches and the environment; data stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
