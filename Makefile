# Every target sets up .venv by itself. `make test` and `make demo` need Python 3.11 or later and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKPOINT ?= model_cards/speed-t5-en-de-small
# Data and models come from local files in tests and demo.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test slow check lint fix clean

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py --checkpoint $(CHECKPOINT)

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m "not slow and not gpu" --durations=10

slow: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[lm-eval]"
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m "slow and not gpu" --durations=10

check: lint test

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mlinter --no-progress --no-cache src/speed_hf

fix: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'speed_hf needs Python 3.11 or later: make PYTHON=python3.11 ...')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[train,demo,test]"
	touch $@
