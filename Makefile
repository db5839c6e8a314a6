# Two commands matter: `make serve` and `make test`. `make` alone lists the rest.

PYTHON ?= python3
MODEL ?= models/tiny-gpt2
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= auto

VENV_PYTHON := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help set-up serve test lint format bench report docs wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-8s %s\n", $$1, $$2}'
	@echo
	@echo "  Variables: MODEL=$(MODEL) PORT=$(PORT) ARGS='options of vllm serve' PYTEST_ARGS='options of pytest'"
	@echo "             PYTEST_WORKERS=$(PYTEST_WORKERS) (processes that test side by side; 0 is one, with the terminal)"
	@echo "             PYTHON=$(PYTHON) ROSE_DEVICE=cpu|cuda (default: cuda where nvidia-smi works)"

set-up: ## create .venv and install everything (the other targets do it when needed)
	@$(PYTHON) scripts/set_up.py

serve: set-up ## serve MODEL with vLLM and the rose backend on PORT, print a curl line to try
	@exec $(VENV_PYTHON) scripts/serve.py "$(MODEL)" --port "$(PORT)" $(ARGS)

test: lint ## lint, then run every test
	$(VENV_PYTHON) -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: set-up ## ruff and mypy
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

format: set-up ## rewrite the code with ruff
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

bench: set-up ## time the block manager
	$(VENV_PYTHON) -m benchmarks.block_manager

report: set-up ## tables and figures of docs/performance and README from benchmarks/results
	$(VENV_PYTHON) -m benchmarks.report

docs: set-up ## build the documentation into site/, its tables of options and tuning from the code
	$(VENV_PYTHON) scripts/document_options.py
	$(VENV_PYTHON) scripts/document_tuning.py
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict

wheel: set-up ## build the wheel of the last commit into dist/, the same bytes wherever it is built
	$(VENV_PYTHON) scripts/make_wheel.py

clean: ## remove .venv and every cache
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis rose_backend.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
