# Each target sets up .venv by itself, again whenever pyproject.toml or constraints.txt changed.
PYTHON3 ?= python3
# Also where the environment forbids it: tests start many processes, and each would compile the package anew.
export PYTHONDONTWRITEBYTECODE =
PYTHON := .venv/bin/python
INSTALLED := .venv/.installed
# What only the documentation needs has a stamp of its own, so that `make test` does not wait for it.
INSTALLED_DOCS := .venv/.installed-docs

# The frameworks have an environment of their own, since the package does not need them.
PYTHON_FRAMEWORKS := .venv-frameworks/bin/python
INSTALLED_FRAMEWORKS := .venv-frameworks/.installed
FRAMEWORKS := --constraint constraints.txt --constraint constraints-frameworks.txt

# The oldest versions that pyproject.toml allows. Without a GPU, give an index of torch's CPU builds in TORCH_INDEX.
PYTHON_OLDEST := .venv-oldest/bin/python
INSTALLED_OLDEST := .venv-oldest/.installed
OLDEST := torch==2.9.0 triton==3.5.0

# The newest torch that is published, with the triton that it asks for.
PYTHON_NEWEST := .venv-newest/bin/python
INSTALLED_NEWEST := .venv-newest/.installed

.PHONY: demo demo-deepspeed test test-all test-cpus test-oldest test-newest test-frameworks ptx faults check docs bench bench-gpu versus clean

demo: $(INSTALLED)
	$(PYTHON) -m powersgd_triton demo

# ZeRO stage 0 to 3: make demo-deepspeed STAGE=3
STAGE ?= 2
demo-deepspeed: $(INSTALLED)
	$(PYTHON) -m powersgd_triton demo --parallelism zero$(STAGE) --steps 200

# A file is one process's work, since its tests share results of spawned workers, up to four processes: more than eight
# files at a time would only wait for memory. One more than there are processors, since some files wait for timeouts.
# In the order of the folders, of which the last have the short files.
PROCESSORS := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
PARALLEL := --numprocesses $(shell expr $(PROCESSORS) + 1) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTHON) -m pytest $(PARALLEL) --timeout 1800 -m "not slow and not gpu"

test-all: $(INSTALLED)
	$(PYTHON) -m pytest $(PARALLEL) --timeout 3600 -m "not gpu"

# What computes: in other libraries' code for older processors, with other numbers of threads, and without our own in C.
NUMERICAL := tests/core tests/faults/test_fuzz.py tests/kernels tests/ops tests/schemes $(wildcard tests/test_compressor*.py)
ON_CPUS := $(PYTHON) -m pytest $(PARALLEL) --timeout 1800 -m "not slow and not gpu" $(NUMERICAL)
NO_VECTORS := AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL

test-cpus: $(INSTALLED)
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Nehalem \
		NPY_DISABLE_CPU_FEATURES="$(NO_VECTORS)" $(ON_CPUS)
	ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Sandybridge OMP_NUM_THREADS=4 $(ON_CPUS)
	OPENBLAS_CORETYPE=Haswell OMP_NUM_THREADS=2 $(ON_CPUS)
	WITHOUT_C=1 $(ON_CPUS)

test-oldest: $(INSTALLED_OLDEST)
	$(PYTHON_OLDEST) -m pytest $(PARALLEL) --timeout 1800 -m "not slow and not gpu"

test-newest: $(INSTALLED_NEWEST)
	$(PYTHON_NEWEST) -m pytest $(PARALLEL) --timeout 1800 -m "not slow and not gpu"

# Accelerate, transformers' Trainer and Lightning with every wrapper, and their checkpoints. Examples, also of Ray Train.
test-frameworks: $(INSTALLED_FRAMEWORKS)
	OMP_NUM_THREADS=1 $(PYTHON_FRAMEWORKS) -m pytest tests/frameworks --timeout 1800

# The kernels' PTX on the CPU (docs/kernels.md), then the interpreter's programs in a random order. Needs a C compiler, and
# no GPU. Each run prints what was found, and how much of each kernel was executed.
EMULATED := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -p tests.ptx.plugin --timeout 7200
HARD := tests/kernels/test_orthogonalize.py::test_hard_inputs
HARD += tests/kernels/test_differences.py::test_same_bits_as_the_reference
KERNELS := tests/kernels tests/ops/test_triton_backend.py tests/core/test_overflow.py -m "not slow and not gpu"

ptx: $(INSTALLED)
	$(EMULATED) tests/ptx/cases.py $(HARD) --schedules 20
	$(EMULATED) tests/ptx/cases.py $(HARD) --schedules 20 --capability 90
	$(EMULATED) $(KERNELS)
	$(PYTHON) -m pytest $(PARALLEL) --timeout 1800 $(KERNELS) --program-order 1

# Rewrites the tables in docs/faults.md, with every fault 50 times, and in docs/guides/torchft.md, in ten to twenty-five
# minutes each. The pages say how many times each fault was injected for the tables that they hold.
faults: $(INSTALLED)
	$(PYTHON) -m tests.faults --write
	$(PYTHON) -m tests.elastic --write

check: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# Into docs/_build/index.html. Needs no network once installed.
docs: $(INSTALLED_DOCS)
	$(PYTHON) -m sphinx -W --keep-going --quiet docs docs/_build

bench: $(INSTALLED)
	@echo "Times a hook step on the CPU, in about three minutes on two cores. The table comes at the end."
	$(PYTHON) -m pytest benchmarks -v --no-header --benchmark-quiet -m "not gpu"

# Without an installation: python3 -m pytest benchmarks -m gpu. With tests and traces: benchmarks/gpu_session.sh.
bench-gpu: $(INSTALLED)
	@echo "Times kernels and steps on a GPU, for up to eight minutes; what is left then is skipped (--budget)."
	$(PYTHON) -m pytest benchmarks -v --no-header --benchmark-quiet -m gpu --record gpu

# Trains what benchmarks/results/versus.json lacks, in minutes for each training, and rewrites docs/versus.md's tables.
versus: $(INSTALLED)
	$(PYTHON) benchmarks/versus.py run
	$(PYTHON) benchmarks/versus.py report --write

clean:
	rm -rf .venv .venv-frameworks .venv-oldest .venv-newest build dist docs/_build demo-results .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info

# torch first and by itself, so that nothing else decides which build of it is taken. Bytecode in the end, with all cores:
# pip has one. Some packages have files that are no Python of this version.
$(INSTALLED): pyproject.toml setup.py $(wildcard powersgd_triton/ops/*.[ch]) constraints.txt
	$(PYTHON3) -m venv .venv
	$(PYTHON) -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(PYTHON) -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	$(PYTHON) -m compileall -qq -j 0 .venv/lib || true
	touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

$(INSTALLED_FRAMEWORKS): pyproject.toml setup.py $(wildcard powersgd_triton/ops/*.[ch]) constraints.txt constraints-frameworks.txt
	$(PYTHON3) -m venv .venv-frameworks
	$(PYTHON_FRAMEWORKS) -m pip install --quiet $(FRAMEWORKS) torch
	$(PYTHON_FRAMEWORKS) -m pip install --quiet $(FRAMEWORKS) --editable ".[accelerate,deepspeed,lightning,transformers]" hypothesis pytest pytest-timeout "ray[train]" torchft torchtitan
	touch $@

# All else as in constraints.txt. The interpreter of triton 3.5 converts arrays of one element, which NumPy 2.4 refuses.
$(INSTALLED_OLDEST): pyproject.toml setup.py $(wildcard powersgd_triton/ops/*.[ch]) constraints.txt
	python3.10 -m venv .venv-oldest || $(PYTHON3) -m venv .venv-oldest
	grep --invert-match --extended-regexp "^(torch|triton|numpy)==" constraints.txt > .venv-oldest/constraints.txt
	printf "%s\n" $(OLDEST) "numpy<2.4" >> .venv-oldest/constraints.txt
	$(PYTHON_OLDEST) -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) torch==2.9.0+cpu,torch==2.9.0)
	$(PYTHON_OLDEST) -m pip install --quiet --constraint .venv-oldest/constraints.txt --editable ".[dev]"
	touch $@

$(INSTALLED_NEWEST): pyproject.toml setup.py $(wildcard powersgd_triton/ops/*.[ch]) constraints.txt
	$(PYTHON3) -m venv .venv-newest
	grep --invert-match --extended-regexp "^(torch|triton|setuptools)==" constraints.txt > .venv-newest/constraints.txt
	$(PYTHON_NEWEST) -m pip install --quiet --constraint .venv-newest/constraints.txt torch
	$(PYTHON_NEWEST) -m pip install --quiet --constraint .venv-newest/constraints.txt --editable ".[dev]"
	touch $@
