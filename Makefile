# Everything starts from these: a fresh machine needs Python ≥ 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
# One exact version: an open range would let pip choose a build for other hardware.
TORCH ?= torch==2.13.0
# The benchmarks' peers use torchvision: without its dependencies, lest it brings another torch, and
# in a folder of its own, since beside a CPU build of torch it breaks whatever imports it.
TORCHVISION ?= torchvision==0.28.0
BIN := $(VENV)/bin
# More workers than two cores: many tests wait, those of tests/cluster for Slurm most of the time.
WORKERS ?= 4
# Where Python may not keep compiled modules, each process that a test starts compiles them anew.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup

.PHONY: train test test-all lint bench pictures gpu-kit dist clean help
help: ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable '.[bench]'
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/torchvision "$(TORCHVISION)"
	touch $@

train: $(VENV)/.ready ## set up, train the spiral recipe, make a page of the result
	$(BIN)/samestep train spiral --report

test: $(VENV)/.ready lint ## set up, lint, run the tests that need nothing but this machine
	$(PYTEST) -m "not slow and not cluster"

test-all: test ## the same, then every command of the documentation, and a real Slurm
	$(PYTEST) -m "slow or cluster"

lint: $(VENV)/.ready ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.ready-bench ## measure side by side with peers, write benchmarks/results/
	$(BIN)/python benchmarks/run.py

pictures: $(VENV)/.ready ## make every screenshot that the docs show (Debian's chromium, chromium-driver)
	$(BIN)/python tools/pictures.py

gpu-kit: $(VENV)/.ready ## gather .gpu-kit/ for a machine with a GPU: [PROBE=probe.json] [DATA=DIR]
	$(BIN)/python tools/gpu_kit.py $(if $(PROBE),--probe "$(PROBE)") $(if $(DATA),--data "$(DATA)")

dist: $(VENV)/.ready ## build the sdist, from it the wheel, and try the wheel in a fresh venv
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tools/smoke.py dist/*.whl

clean: ## remove the virtual environment, what was built, and caches
	rm -rf $(VENV) build dist .gpu-kit .pytest_cache .mypy_cache .ruff_cache .hypothesis
