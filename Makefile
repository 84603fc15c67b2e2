# Every target sets the project up first; when that is done already it takes no time.
PYTHON_BIN := .venv/bin/python

.PHONY: setup quickstart testbed test test-integration test-all test-gpu test-engines cuda-check lint bench

setup:
	@scripts/setup.sh

# A GRPO run on whatever the machine has, with its curves: make quickstart ARGS="--seed 2"
quickstart: setup
	$(PYTHON_BIN) grpo.py $(ARGS)
	$(PYTHON_BIN) scripts/plot.py runs

# The model of the learning tests and of the KL study; made once for each seed: make testbed ARGS="--seed 2"
testbed: setup
	$(PYTHON_BIN) studies/pretrain_tiny.py $(ARGS)

# The options of both parts of what CI runs
PYTEST := $(PYTHON_BIN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 50 --durations-min 1
OTHERS := not slow and not learn and not gpu and not engines

test: setup
	$(PYTEST) -m "not integration and $(OTHERS)" $(ARGS)

# The other part: whole runs, processes and their ends, some seconds each
test-integration: setup
	$(PYTEST) -m "integration and $(OTHERS)" $(ARGS)

# Every test; continues where it was stopped: make test-all ARGS='-m "slow or learn"', ARGS=tests/runs/test_faults.py
test-all: setup
	$(PYTHON_BIN) tests/run_all.py $(ARGS)

# What only a GPU can decide (docs/maintainers/gpu.md); skipped, with the reason, on a machine without one
test-gpu: setup
	$(PYTHON_BIN) -m pytest -v -rs -m gpu $(ARGS)

# Real Slurm, Ray, and the parsers of SkyPilot; installs them, those of PyPI into an environment of their own
test-engines: setup
	@command -v slurmctld >/dev/null || (apt-get update -q && apt-get install -yq slurmctld slurmd slurm-client munge iproute2)
	@[ -x .engines/bin/ray ] || (python3 -m venv .engines && .engines/bin/pip install -q -r requirements-engines.txt)
	$(PYTHON_BIN) -m pytest -q -n 2 --dist loadfile --durations 8 -rs -m engines tests/launch $(ARGS)

# The GPU path on a fake CUDA device, without a GPU (docs/models.md); installs the CUDA wheels into .cuda
cuda-check:
	@tests/fake_cuda/setup.sh
	.cuda/bin/python tests/fake_cuda/check.py $(ARGS)

lint: setup
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m ruff format --check .
	$(PYTHON_BIN) studies/shape.py

bench: setup
	$(PYTHON_BIN) studies/benchmark.py $(ARGS)
