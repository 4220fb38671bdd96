# `make demo` and `make test` do their own set-up; see `make help`. Works with GNU make 3.81, which macOS ships.
# PYTHON=/path/to/python3 chooses the interpreter that .venv is made with.

BIN := .venv/bin

# The folders that hold the package; each X is kvferry.X.
PACKAGES := ablations cli client core engine kernels mapper proto receiver sender

.DEFAULT_GOAL := help
.PHONY: help demo test test-real test-metal test-fuzz test-endurance test-llmlingua check format gen gen-check smoke clean setup-run setup-dev

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile

demo: setup-run ## fetch a small model and carry a document from one daemon to another
	$(BIN)/kvferry models add smollm2-135m-instruct
	$(BIN)/kvferry demo

test: setup-dev ## run the tests, a file at a time on every core (no network, no model)
	$(BIN)/python -m pytest -n auto --dist loadfile

test-real: setup-dev ## run the tests that need the demo model (downloads it once)
	$(BIN)/kvferry models add smollm2-135m-instruct
	$(BIN)/python -m pytest -m real_model

test-metal: setup-dev ## run the tests that need Apple silicon
	$(BIN)/python -m pytest -m metal

test-fuzz: setup-dev ## run ten thousand random cases through every parser (minutes)
	$(BIN)/python -m pytest -m fuzz -o faulthandler_timeout=0

test-endurance: setup-dev ## run the load, endurance and exhaustive damage tests (minutes)
	$(BIN)/python -m pytest -m endurance -o faulthandler_timeout=0

test-llmlingua: setup-dev ## install torch and llmlingua as well and run the tests of A8 with them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[llmlingua]"
	$(BIN)/python -m pytest -m llmlingua

check: setup-dev gen-check ## lint, format, types, layers and stubs; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

format: setup-dev ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gen: setup-dev ## regenerate the gRPC stubs from proto/v1/*.proto
	sh .ci/stubs.sh write

gen-check: setup-dev ## fail if the committed stubs are not what the compiler makes
	sh .ci/stubs.sh check

smoke: setup-dev ## sdist, wheel from it, fresh environment, import everything
	sh .ci/smoke.sh

clean: ## remove the environment, caches and build output
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests -type d -name __pycache__ -prune -exec rm -rf {} +

setup-run:
	@sh deploy/setup.sh run

setup-dev:
	@sh deploy/setup.sh dev
