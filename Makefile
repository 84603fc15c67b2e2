# Every target sets the project up first; when that is done already it takes no time.
PYTHON_BIN := .venv/bin/python

.PHONY: setup quickstart testbed test lint bench bench-gate

setup:
	@scripts/setup.sh

# A GRPO run on whatever the machine has, with its curves: make quickstart ARGS="--seed 2"
quickstart: setup
	$(PYTHON_BIN) grpo.py $(ARGS)
	$(PYTHON_BIN) scripts/plot.py runs

# The model of the learning tests and of scripts/study_kl.sh; made once for each seed: make testbed ARGS="--seed 2"
testbed: setup
	$(PYTHON_BIN) scripts/pretrain_tiny.py $(ARGS)

test: setup
	$(PYTHON_BIN) -m pytest -q -n 2 --dist loadfile --max-worker-restart 0 $(ARGS)

lint: setup
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m ruff format --check .
	$(PYTHON_BIN) scripts/link_lines.py --check
	$(PYTHON_BIN) scripts/shape.py

bench: setup
	$(PYTHON_BIN) scripts/benchmark.py $(ARGS)

# Is this commit slower, larger or worse than those before? CONTRIBUTING.md: make bench-gate ARGS="--what speed,memory"
bench-gate: setup
	$(PYTHON_BIN) scripts/history.py --gate $(ARGS)
