# Everything happens in one virtual environment, .venv, with the versions of constraints.txt; what is compared with other
# tools has its own, .bench-venv, with the same versions and these tools. `make` alone lists the targets.

BIN := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)
COMPARED := nnsight==0.8.1 transformer_lens==4.3.0 pytest
PYTHONS := $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14)

.DELETE_ON_ERROR:
.PHONY: help setup demo test weights findings bench benchmark lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready  ## make .venv, or bring it up to date

demo: setup  ## set up, analyze the pre-LN and the post-LN checkpoint in data/ and write their reports
	$(BIN)/depthprobe analyze data/checkpoints/pre --out reports/pre
	$(BIN)/depthprobe analyze data/checkpoints/post --out reports/post

test: setup weights  ## set up, fetch the real models, then lint, check types and run every test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

weights: setup  ## fetch the two real models (90 MB each) into .weights, unless they are there
	$(BIN)/python scripts/fetch_weights.py

findings: setup  ## write what the studies found, and their figures, from data/results
	$(BIN)/python analyses/findings.py

bench: weights  ## measure what probes, sweep, trainer and estimators of depth cost beside what one would write without depthprobe
	$(BIN)/python analyses/bench_probes.py
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python analyses/bench_sweep.py
	$(BIN)/python analyses/bench_lab.py
	$(BIN)/python analyses/bench_depth.py

benchmark: weights .bench-venv/ready  ## measure depthprobe side by side with nnsight and TransformerLens, which takes about half an hour
	.bench-venv/bin/python analyses/benchmark.py

lint: setup  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove caches and build leftovers; .venv, .weights and reports stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './.*venv/*' -prune -exec rm -rf {} +

# torch goes first and by its exact version: left to a later resolution, a newer build with CUDA may come in its place
.venv/ready: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

.bench-venv/ready: pyproject.toml constraints.txt Makefile | $(BIN)/pip
	$(BIN)/python -m venv .bench-venv
	.bench-venv/bin/python -m pip install -c constraints.txt '$(TORCH)'
	.bench-venv/bin/python -m pip install -c constraints.txt -e '.[gguf]' $(COMPARED)
	@touch $@

$(BIN)/pip:
	@for python in $(PYTHONS); do \
		if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "$$python -m venv .venv"; exec "$$python" -m venv .venv; \
		fi; \
	done; \
	echo "found no Python 3.11 or newer with its venv module among: $(PYTHONS); install one" \
		"(Debian: apt-get install python3-venv) or name it: make PYTHON=/path/to/python" >&2; \
	exit 1
