# `make test` and `make demo` need only python3 (3.11 or newer) and make. Each makes .venv and
# installs into it once; a change of the dependencies makes it install again.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test soak check format clean

help:
	@echo "make demo    train the character language model on two CPU devices (about 3 minutes)"
	@echo "make test    make check, then all tests (under 10 minutes on 2 cores)"
	@echo "make soak    4,000 drawn models, always others (a few minutes)"
	@echo "make check   format, lint, types, layer order; changes nothing"
	@echo "make format  format, and repair what the linter can"
	@echo "make clean   remove .venv and the caches and builds of the tools"

demo: $(READY)
	$(BIN)/python examples/char_lm.py

test: check
	$(BIN)/pytest

soak: $(READY)
	$(BIN)/pytest tests/test_drawn_models.py --hypothesis-profile=soak \
	    --timeout=0 -o faulthandler_timeout=0

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest --quiet tests/test_layers.py

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@echo "Installing lightning-gpipe and its tools into .venv (once)"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[dev,examples]'
	@touch $@
