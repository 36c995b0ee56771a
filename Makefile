# Everything here makes its own virtual environment first; `make` alone lists what there is.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m

# Two stamps, so that the environment is installed again only when what it is made from changed.
DEV := $(VENV)/.installed-dev
EXAMPLES := $(VENV)/.installed-examples
# What the package is built from; the extensions in C++ where there is a compiler.
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard grammar/native/* runtime/native/*)

# What `make bench` runs as it is.
BENCHMARKS := $(filter-out __init__ determinism plotting, $(notdir $(basename $(wildcard benchmarks/*.py))))

# Where it is set, every process that a test starts compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= 2

PYTEST := $(BIN)/python -m pytest
INSTALL := $(BIN)/python -m pip install -qq -c constraints.txt

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-full lint format bench clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(DEV) ## Create or refresh .venv with everything development needs

demo: $(EXAMPLES) ## Pull the small model and run the first example
	$(BIN)/palmette pull $(MODEL)
	$(BIN)/python examples/quickstart.py

test: lint ## Lint, check types and run the tests; what CI runs
	$(BIN)/palmette pull $(MODEL)
	$(PYTEST) -m "not slow and not gpu"

test-full: lint ## The same with the slow tests, and the GPU tests where there is a GPU
	$(BIN)/palmette pull $(MODEL)
	$(PYTEST)

lint: $(DEV) ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV) ## Mend what can be mended of style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(EXAMPLES) ## Run every benchmark and print its figures
	$(BIN)/palmette pull $(MODEL)
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name; done
	$(BIN)/python -m benchmarks.determinism --quick
	$(BIN)/python -m benchmarks.programs --ablations no-cache small-pool

clean: ## Remove what was built and cached; .venv and pulled models stay
	rm -rf build dist palmette.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	rm -f grammar/_native.*.so runtime/_native.*.so $(DEV) $(EXAMPLES)  # installed again with the next target
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEV): $(SOURCES) | $(BIN)/python
	@echo "Installing into $(VENV): a minute or more the first time"
	$(INSTALL) -e '.[dev]'
	@touch $(EXAMPLES) $@

$(EXAMPLES): $(SOURCES) | $(BIN)/python
	@echo "Installing into $(VENV): a minute or more the first time"
	$(INSTALL) -e '.[examples]'
	@touch $@
