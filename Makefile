# Everything starts from these: a fresh machine needs Python ≥ 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
# One exact version: an open range would let pip choose a build for other hardware. All other
# versions are in constraints.txt; `make constraints` writes it anew from what is installed.
TORCH ?= torch==2.13.0
# The benchmarks' peers use torchvision: without its dependencies, lest it brings another torch, and
# in a folder of its own, since beside a CPU build of torch it breaks whatever imports it.
TORCHVISION ?= torchvision==0.28.0
EXTRAS := comet,cricket,huggingface,images,lightning,mirror,mlflow,optuna,plot,safetensors,tensorboard,wandb,yaml
# Any version, so that pip may choose a build with gigabytes of CUDA: TORCH_NEWEST=torch==2.12.1.
TORCH_NEWEST ?= torch
VENV_NEWEST ?= .venv-newest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# More workers than two cores: many tests wait, those of tests/cluster for Slurm most of the time.
WORKERS ?= 4
WORKERS_ALL ?= 6
# Where Python may not keep compiled modules, each process that a test starts compiles them anew.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest --dist loadgroup --numprocesses
FAST := $(WORKERS) -m "not slow and not cluster"

.PHONY: train test test-all test-times lint docs lowest newest constraints bench pictures gpu-kit dist clean help
help: ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

# The pip of a new environment may be too old to know --group.
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Installing PyTorch and samestep in $(VENV): 2.3 GB, some minutes."
	@$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]' --group dev
	touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(PIP) install --quiet --constraint constraints.txt --group bench
	$(PIP) install --quiet --no-deps --target $(VENV)/torchvision "$(TORCHVISION)"
	touch $@

train: $(VENV)/.ready ## set up, train the spiral recipe, make a page of the result
	$(BIN)/samestep train spiral --report
	@echo "For the command samestep in this terminal: . $(BIN)/activate"

test: $(VENV)/.ready ## set up, lint, run the tests that need nothing but this machine
	$(PYTEST) $(FAST)

test-all: $(VENV)/.ready ## the same, every command of the documentation, and a real Slurm
	$(PYTEST) $(WORKERS_ALL)

test-times: $(VENV)/.ready ## run `make test`, show what the 60 heaviest tests cost
	$(PYTEST) $(FAST) --heaviest 60

lint: $(VENV)/.ready ## ruff, mypy, spelling, and plain English (tools/words.toml)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python tools/prose.py

bench: $(VENV)/.ready-bench ## measure side by side with peers, write benchmarks/results/
	$(BIN)/python benchmarks/run.py

docs: $(VENV)/.ready ## build the handbook as a site, in site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict # --quiet would hide warnings from --strict
	@echo "Open site/index.html."

pictures: $(VENV)/.ready ## make every screenshot that the docs show (Debian's chromium, chromium-driver)
	$(BIN)/python tools/pictures.py

gpu-kit: $(VENV)/.ready ## gather .gpu-kit/ for a machine with a GPU: [PROBE=probe.json] [DATA=DIR]
	$(BIN)/python tools/gpu_kit.py $(if $(PROBE),--probe "$(PROBE)") $(if $(DATA),--data "$(DATA)")

dist: $(VENV)/.ready ## build the sdist, from it the wheel, and try the wheel in a fresh venv
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tools/smoke.py dist/*.whl

lowest: $(VENV)/.ready ## try samestep with the lowest version of each package that it needs
	$(BIN)/python tools/smoke.py --lowest

newest: ## run the tests with the newest versions of all packages: [TORCH_NEWEST=torch==2.12.1]
	$(PYTHON) -m venv --clear $(VENV_NEWEST)
	$(VENV_NEWEST)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV_NEWEST)/bin/python -m pip install --quiet "$(TORCH_NEWEST)" --editable '.[$(EXTRAS)]' --group dev
	$(VENV_NEWEST)/bin/python tools/newest.py --dist loadgroup --numprocesses $(FAST)

constraints: $(VENV)/.ready-bench ## write constraints.txt anew from what is installed
	$(PIP) freeze --exclude-editable | grep -vE '^(torch|torchvision|pip|triton|nvidia-.*)==' > constraints.txt

clean: ## remove the virtual environment, what was built, and caches
	rm -rf $(VENV) $(VENV_NEWEST) build dist site .gpu-kit .pytest_cache .mypy_cache .ruff_cache .hypothesis
