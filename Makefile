# `make demo` and `make test` need nothing but Python 3.11+: they make .venv themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test check bench readme clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/python examples/summarise.py

test: $(VENV)/.ready
	$(BIN)/pytest --numprocesses 2

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m anabranch.bench.report --check

bench: $(VENV)/.ready
	$(BIN)/anabranch bench merge

readme: $(VENV)/.ready
	$(BIN)/python -m anabranch.bench.report

clean:
	rm -rf $(VENV) build dist *.egg-info
