# Every target sets up what it needs: a virtual environment in .venv with pinned packages.
# A second run finds its stamp and goes straight to work.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On a machine without an NVIDIA driver the CPU wheels of PyTorch save gigabytes, where their index can be reached.
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check $$( \
	! command -v nvidia-smi >/dev/null 2>&1 \
	&& curl --silent --fail --head --max-time 3 --output /dev/null $(CPU_INDEX)/ 2>/dev/null \
	&& printf -- '--extra-index-url $(CPU_INDEX)' || true)

RUN_STAMP := $(VENV)/.stamp-run
DEV_STAMP := $(VENV)/.stamp-dev
FUZZ := $(VENV)/fuzz

.PHONY: demo test test-all check lint bench fuzz clients clean

demo: $(RUN_STAMP)  ## a real model writes Python, without and with its drafter, side by side
	@$(BIN)/lean-laguna bench --demo

test: $(DEV_STAMP)  ## every test that runs on a CPU in minutes
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not vllm"

test-all: $(DEV_STAMP)  ## the slow ones too
	@$(BIN)/python -m pytest -m "not gpu and not vllm"

check: $(DEV_STAMP)  ## linters, types, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

lint: $(DEV_STAMP)  ## mend what the linters can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(RUN_STAMP)  ## the numbers of the README, written to results/
	@sh scripts/bench_readme.sh $(BIN)

fuzz: $(RUN_STAMP) $(FUZZ)/bin/st  ## 10,000 requests made from the server's own description: no 5xx, no dropped connection
	@sh scripts/fuzz_server.sh $(BIN) $(FUZZ)/bin 10000

clients: $(RUN_STAMP)  ## openai, anthropic, lm-eval, guidellm and others against the server; written to results/
	@$(BIN)/python tests/clients/prove.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
	  "lean-laguna needs Python 3.11 to 3.13, found %d.%d; set PYTHON=python3.12, say" % v)'
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): requirements/run.txt pyproject.toml | $(BIN)/python
	@echo "installing what the package needs (once; PyTorch is most of it)"
	@$(PIP) -r requirements/run.txt
	@$(PIP) --no-deps --no-build-isolation -e . || $(PIP) --no-deps -e .
	@touch $@

$(FUZZ)/bin/st: requirements/fuzz.txt | $(BIN)/python
	@$(PYTHON) -m venv $(FUZZ)
	@$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/fuzz.txt
	@touch $@

$(DEV_STAMP): $(RUN_STAMP) $(filter-out requirements/fuzz.txt,$(wildcard requirements/*.txt))
	@echo "installing what the tests need (once)"
	@$(PIP) -r requirements/dev.txt
	@$(PIP) -r requirements/oracle.txt
	@$(PIP) --no-deps -r requirements/oracle-nodeps.txt
	@touch $@
