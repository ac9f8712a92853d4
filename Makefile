# `make` alone lists what there is.  Every target sets up what it needs; a second call skips what is done.

PYTHON ?= python3.11
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed
# one compute thread per worker, and threads that wait asleep: workers share the cores
export OMP_WAIT_POLICY = PASSIVE
export RAY_USAGE_STATS_ENABLED = 0
export MLFLOW_DISABLE_TELEMETRY = true
# without bytecode files every process that a test starts compiles all modules again
export PYTHONDONTWRITEBYTECODE =
ARGS ?=
# processes for the tests; each file's tests stay in one of them
PROCESSES ?=
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m tests.parallel --processes

.DEFAULT_GOAL := help
.PHONY: help setup train check test test-all run-check run-test run-test-all gpu test-matrix mutants chaos soak storm preemptions fuzz fault-simulation fault-simulation-nightly fault-mutants nodes slurm reference docs image release-check lint prose format clean

help:  ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

setup: $(STAMP)  ## create .venv and install the project with everything it needs

$(STAMP): pyproject.toml constraints.txt Makefile
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not there; install Python 3.11 or say make PYTHON=python3"; exit 1; }
	@echo "installing PyTorch, Ray, MLflow and the others into $(VENV): about 3 minutes, 4 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[service,asr,synth,onnx,tune,sweep,store,trackers,docs,dev]'
	@touch $(STAMP)

train: $(STAMP)  ## train on synthetic digits and print a word error rate; make train ARGS="optimizer=sgd"
	$(BIN)/ngsgd train $(ARGS)

# lint runs beside the tests
check test test-all: $(STAMP)
	@$(MAKE) --no-print-directory -j2 lint run-$@

check:     ## 2 minutes: lint, doctests and one case of each quick test
test:      ## 5 minutes: lint, doctests, all tests in this process and a few complete runs
test-all:  ## 40 minutes: everything that CI runs, with faults, services, browsers and slow tests

run-check: $(STAMP)
	$(PYTEST) $(or $(PROCESSES),2) tests -m "not (end_to_end or slow or faults or services)" --quick $(ARGS)

run-test: $(STAMP)
	$(PYTEST) $(or $(PROCESSES),2) tests -m "end_to_end or not (slow or faults or services)" --first-cases $(ARGS)

# Triton is beside the environment, because torch imports it wherever it finds it
$(VENV)/triton: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ -c constraints.txt triton || \
		echo "make: no Triton for this platform; its kernels are not tested"

# half of its time is waiting for other processes
run-test-all: $(STAMP) $(VENV)/triton
	$(PYTEST) $(or $(PROCESSES),4) tests $(ARGS)

gpu: $(STAMP)  ## check and measure on a GPU, one JSON file and benchmarks/gpu/RESULTS.md (8 min); make gpu ARGS=--dry-run for the CPU
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu $(ARGS)

test-matrix: $(STAMP)  ## the numerical tests with AVX2 only, without a compiler, with 1 and 2 threads, with other MKL paths (20 min)
	$(BIN)/python tests/matrix.py $(ARGS)

mutants: $(STAMP)  ## break the numbers in some forty ways, one at a time, and see that a test notices each (4 min)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py $(ARGS)

nodes: $(STAMP)  ## train over machines made of network namespaces: cut cables, lost nodes, a slow network (root, 9 min)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.nodes.scenarios $(ARGS)

slurm: $(STAMP)  ## a real Slurm on nodes of that kind: time limit, preemption, scancel (root, slurm-wlm and munge, 10 min)
	OMP_NUM_THREADS=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.nodes.slurm $(ARGS)

chaos: $(STAMP)  ## break all that can break, in 161 cases, and write the table into benchmarks/fault-matrix.md (10 min)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --write benchmarks/fault-matrix.md $(ARGS)

soak: $(STAMP)  ## 16 workers, a random fault every 20 to 30 s for 20 min: what is left of the speed; make soak ARGS="--minutes 5"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.soak $(ARGS)

storm: $(STAMP)  ## 32 workers, 1-second jobs and 125 faults an hour for 30 min, dead coordinators included; make storm ARGS="--minutes 3"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.storm $(ARGS)

preemptions: $(STAMP)  ## 8 workers, each preempted every 90 s with a notice of 2 s, 20 min; make preemptions ARGS="--minutes 3"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.preemptions $(ARGS)

fuzz: $(STAMP)  ## crash points, full disks, damaged files, power cuts, two coordinators (40 min); make fuzz ARGS="damage --cases 100"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(or $(ARGS),all)

fault-simulation: $(STAMP)  ## 10,000 seeds of simulated faults in two processes (10 min); make fault-simulation ARGS="--seconds 60"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulation --processes 2 $(or $(ARGS),--seeds 10000)

fault-simulation-nightly: $(STAMP)  ## 50,000 seeds of simulated faults (45 min)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulation --processes 2 --seeds 50000 $(ARGS)

fault-mutants: $(STAMP)  ## plant bugs, which simulated faults or tests must find (30 min); ARGS="--generated 200" draws them from the source
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fault_mutants --write benchmarks/fault-mutants.md $(ARGS)

reference: $(STAMP)  ## write the pages of docs/reference that are made from the code
	$(BIN)/python -m tools.reference docs/reference

docs: $(STAMP)  ## build the documentation into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

image: ## the steps of docker/Dockerfile on this machine, without Docker, into .venv-image
	docker/build-steps.sh install $(VENV)-image
	docker/build-steps.sh check $(VENV)-image

release-check: $(STAMP)  ## rehearse a release: build, check, install, train and test in new environments (20 min)
	$(BIN)/python -m tools.release_check $(ARGS)

lint: $(STAMP)  ## style, types, import layers and prose
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.prose

prose: $(STAMP)  ## words, sentences, widths and spellings of everything that people read; make prose ARGS="docs README.md"
	$(BIN)/python -m tools.prose $(ARGS)

format: $(STAMP)  ## sort imports and mend what ruff can
	$(BIN)/ruff check --fix .

clean:  ## remove the virtual environment and caches, never runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info
