# `make test` and `make demo` need only python3 (3.11 or newer) and make. Each makes .venv and
# installs into it once; a change of the dependencies makes it install again. `make bench` does the
# same with .venv-bench, which has the packages that we are compared with. Where a Python has what it
# takes (torch for CUDA, say), it is used as it is: make bench-gpu BENCH=/usr/bin/python3, and
# make test-nccl likewise.
#
# `make models` has .venv-models, for torchvision's wheel is built for CUDA: beside the CPU build of
# torch, `import lightning` works there only after tests/models/torchvision_operators.py.
#
# `make test-integrations` has .venv-integrations, for loggers bring many packages of their own.
#
# Tests run beside one another, in processes. JOBS=0 runs them in one, as pytest does.
# Those for GPUs run on simulated ones, in processes of their own; see tests/simcuda/README.md.

PYTHON ?= python3
# One more than there are cores: some tests wait for processes most of the time. Each imports and
# collects all tests, which takes half a minute.
JOBS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
TOOLS := tests/benchmarks tests/mutation tests/published tests/examples/test_quickstart.py
TRAINER := tests/lightning tests/strategy tests/checkpoints tests/callbacks tests/commands tests/distributed
SAMPLED := SAMPLED_CASES=6
PARALLEL := --numprocesses=$(JOBS) --maxprocesses=8 --dist=worksteal
# Lightning and jsonargparse write files in the encoding of the locale, which may lack a character.
export PYTHONUTF8 := 1
# Tests start a hundred processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
READY := .venv/.ready
BENCH := .venv-bench/bin/python
ifeq ($(origin BENCH), file)
BENCH_READY := .venv-bench/.ready
endif

.PHONY: help demo test test-all test-tools test-launches test-integrations test-oldest test-multihost test-nccl test-lightning models soak mutate bench bench-gpu docs dist check format clean

help:
	@echo "make demo    train the character language model on two CPU devices (about 3 minutes)"
	@echo "make test    make check, then the tests of the package, those for GPUs on simulated ones:"
	@echo "             of a test with many cases a sample of them (about ten minutes)"
	@echo "make test-all  the same with all cases (about a quarter of an hour)"
	@echo "make test-tools  the tests of the benchmarks, the notebook, and of what make mutate and"
	@echo "             make test-lightning run (minutes)"
	@echo "make test-launches  fits in scripts and notebooks that start their own processes, how these"
	@echo "             end, and a run that is killed and goes on (minutes)"
	@echo "make test-integrations  loggers of W&B and MLflow, loaders of torchdata (a minute)"
	@echo "make test-oldest  tests of the strategy on the oldest versions that pyproject.toml admits"
	@echo "             (minutes)"
	@echo "make test-multihost  two machines as network namespaces: training, a network that fails,"
	@echo "             restarts (some minutes; Linux, as root or where users may have namespaces)"
	@echo "make test-nccl  processes whose tensors go from GPU to GPU, on real GPUs, two or more"
	@echo "             (minutes); make test runs these tests on simulated ones"
	@echo "make test-lightning  Lightning's own tests with a pipeline in each Trainer that names no"
	@echo "             strategy; LIGHTNING=FOLDER names a checkout of Lightning (some 10 minutes)"
	@echo "make models  models of transformers, PEFT, diffusers, torchvision and timm as pipelines"
	@echo "             (over an hour); ARGS='transformers --only Llama' for some of them"
	@echo "make soak    4,500 drawn models, 1,000 on simulated GPUs; 1,500 drawn fits; faults,"
	@echo "             interrupts, killed processes (some minutes), processes that end or wait (half an hour)"
	@echo "make mutate  takes each effect of the engine out in turn: a test must fail (hours)"
	@echo "make bench   all benchmarks for 2 CPU cores (under half an hour); ARGS=--save keeps the results"
	@echo "make bench-gpu  the tests and benchmarks for one GPU (under 8 minutes)"
	@echo "make docs    the site of docs/, in build/site; a link that leads nowhere ends it. The code"
	@echo "             of the built pages is that of their sources, and runs (a minute)"
	@echo "make dist    wheel and sdist in dist/, checked; the wheel trains in an empty environment"
	@echo "make check   format, lint, types, rooms; changes nothing"
	@echo "make format  format, and repair what the linter can"
	@echo "make clean   remove the environments, and the caches and builds of the tools"

demo: $(READY)
	$(BIN)/python -m examples.char_lm

test: check
	$(SAMPLED) $(BIN)/pytest $(PARALLEL) -m "not launches" $(TOOLS:%=--ignore=%)
	SIMULATED_GPUS=4 $(SAMPLED) $(BIN)/pytest $(PARALLEL) tests/gpu tests/simcuda

test-all: SAMPLED :=
test-all: test

test-tools: $(READY)
	$(BIN)/pytest $(PARALLEL) $(TOOLS)

test-launches: $(READY)
	$(BIN)/pytest -m launches tests/lightning tests/promises tests/core tests/commands

test-integrations: .venv-integrations/.ready
	.venv-integrations/bin/pytest tests/integrations

test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/pytest $(PARALLEL) $(TRAINER) tests/promises/test_processes.py

test-multihost: $(READY)
	$(BIN)/python -m tests.multihost $(ARGS)

test-nccl: $(BENCH_READY)
	$(BENCH) -m tests.gpu

test-lightning: $(READY)
	$(BIN)/python -m tests.published "$(LIGHTNING)" $(ARGS)

models: .venv-models/.ready
	HF_HUB_OFFLINE=1 .venv-models/bin/pytest -p tests.models.torchvision_operators \
	    tests/models tests/examples/test_finetune_llama.py tests/examples/test_classify_digits.py \
	    tests/examples/test_finetune_diffusion.py
	HF_HUB_OFFLINE=1 .venv-models/bin/python -m tests.models $(or $(ARGS),--write docs/models.md)

soak: $(READY)
	$(BIN)/pytest tests/promises/test_drawn_models.py tests/promises/test_drawn_fits.py \
	    tests/promises/test_drawn_fits_over_processes.py tests/promises/test_interrupts.py \
	    tests/promises/test_random_faults.py tests/promises/test_processes.py::test_drawn_models \
	    tests/promises/test_processes_that_fail.py tests/promises/test_killed_runs.py \
	    tests/promises/test_drawn_endings.py \
	    tests/core/transport/process_group/test_many_processes.py \
	    tests/promises/test_steps_by_micro_batch.py tests/promises/test_steps_that_fail.py \
	    --hypothesis-profile=soak --timeout=0 -o faulthandler_timeout=0
	SIMULATED_GPUS=4 $(BIN)/pytest tests/gpu/test_drawn_models.py --hypothesis-profile=soak \
	    --timeout=0 -o faulthandler_timeout=0

mutate: $(READY)
	$(BIN)/python -m tests.mutation $(if $(filter file,$(origin JOBS)),,--jobs $(JOBS)) \
	    $(or $(ARGS),--results tests/mutation/RESULTS.md)

bench: $(BENCH_READY)
	$(BENCH) -m benchmarks cpu $(ARGS)

bench-gpu: $(BENCH_READY)
	$(BENCH) -m benchmarks gpu $(ARGS)

docs: .venv-docs/.ready $(READY)
	@mkdir -p build
	$(BIN)/python -m docs.site.schedules > build/schedules.json
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	$(BIN)/pytest tests/site

dist: .venv-dist/.ready
	rm -rf dist build/installed
	.venv-dist/bin/python -m build --outdir dist
	.venv-dist/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/installed
	build/installed/bin/python -m pip install -qq --disable-pip-version-check \
	    --constraint constraints.txt dist/*.whl
	cd build && installed/bin/python -I ../tests/installed.py

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest --quiet tests/test_rooms.py

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .venv-bench .venv-models .venv-integrations .venv-oldest .venv-docs .venv-dist .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@echo "Installing lightning-gpipe and its tools into .venv (once)"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[dev,examples]'
	@touch $@

.venv-models/.ready .venv-integrations/.ready: .venv-%/.ready: pyproject.toml constraints.txt
	@echo "Installing lightning-gpipe and its $* into .venv-$* (once)"
	@$(PYTHON) -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install -qq --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[$*]'
	@touch $@

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	@echo "Installing lightning-gpipe and the oldest versions that it admits into .venv-oldest (once)"
	@$(PYTHON) -m venv --clear .venv-oldest
	@.venv-oldest/bin/python -m pip install -qq --disable-pip-version-check \
	    --requirement constraints-oldest.txt --editable '.[cli,pretrained,pictures,schedules]'
	@touch $@

# The pages need the sources of the package only, which are read and not imported.
.venv-docs/.ready .venv-dist/.ready: .venv-%/.ready: pyproject.toml constraints.txt
	@echo "Installing what makes the $* into .venv-$* (once)"
	@$(PYTHON) -m venv --clear .venv-$*
	@$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$*'], sep='\n')" > .venv-$*/needs.txt
	@.venv-$*/bin/python -m pip install -qq --disable-pip-version-check \
	    --constraint constraints.txt --requirement .venv-$*/needs.txt
	@touch $@

.venv-bench/.ready: pyproject.toml constraints.txt
	@echo "Installing lightning-gpipe and what it is compared with into .venv-bench (once)"
	@$(PYTHON) -m venv --clear .venv-bench
	@.venv-bench/bin/python -m pip install -qq --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[bench]'
	@touch $@
