# make lab   sets up .venv and opens the notebooks in JupyterLab
# make demo  sets up .venv and completes a prompt in the terminal
# make test  sets up .venv, then lints and tests
# make sanitize  sets up .venv, then runs every kernel under compute-sanitizer
#
# CUDA=sim|cu12|cu13 overrides what the driver suggests: the compiler packages of CUDA 12 or 13, or none.
# PYTHON=python3.12 picks the interpreter, PROMPT="..." the demo's prompt.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= def fibonacci(n):

ifndef CUDA
CUDA := $(shell $(PYTHON) -I rtlib/driver.py)
endif

# tests compile every kernel to SASS, which takes a compiler but no GPU; there is none for macOS
TEST_CUDA = $(if $(filter-out sim,$(CUDA)),$(CUDA),$(if $(filter Darwin,$(shell uname -s)),sim,cu13))

.PHONY: lab demo test sanitize lint clean

lab: $(VENV)/.ready-notebooks,$(CUDA)
	$(VENV)/bin/jupyter lab $(wildcard notebooks)

demo: $(VENV)/.ready-$(CUDA)
	$(VENV)/bin/python -m rtlib generate "$(PROMPT)"

test: lint
	$(VENV)/bin/python -m pytest

# every kernel under compute-sanitizer, on a machine with a GPU and the CUDA toolkit
sanitize: $(VENV)/.ready-test,$(CUDA)
	$(VENV)/bin/python -m tests.gpu.sanitize

lint: $(VENV)/.ready-notebooks,test,$(TEST_CUDA)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV)

# one stamp for each set of extras; packages that are there already are not fetched again
$(VENV)/.ready-%: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable ".[$*]"
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Python %d.%d found, 3.11 to 3.13 expected: run make with PYTHON=python3.12 or similar" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
