# The commands people type; `make help` lists them.
#
#   make demo                   .venv, pinned packages, build, demo
#   make demo ARGS="--steps 9"  with flags of the demo
#   make demo PYTHON=python3.11 with this Python
#   make demo VENV=             with the Python that is active: installs and builds nothing
#   make wheel PYTHON=python3.11 TORCH=2.13.0    a wheel for others than those of .venv

VENV ?= .venv
ARGS ?=
# Processes of the test suite; each may need some GB. On two cores three are faster than two, because
# tests wait for other processes. Slow tests are neighbours in the suite, so a process that has
# finished its share takes tests from the others (worksteal).
WORKERS ?= 3
# The releases of torch that a release has wheels for.
TORCHES ?= 2.11.0 2.13.0 2.15.0
# ALL_PYTHONS=1 checks a wheel in every Python; each downloads a torch of its own (up to 3 GB).
IN_PYTHONS = $(if $(ALL_PYTHONS),--all-pythons)

PIP_FLAGS = --quiet --no-input --disable-pip-version-check --constraint requirements/constraints.txt
UV_FLAGS = --quiet --compile-bytecode --constraint requirements/constraints.txt
CXX_SOURCES = $(shell find csrc tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
BUILD_INPUTS = setup.py pyproject.toml $(shell find csrc -type f -not -name '*.pyc')

ifeq ($(strip $(VENV)),)
IN_VENV =
RUN = $(or $(PYTHON),python3)
SETUP = current-python
TOOLS = current-python
DOCS = current-docs
BARE =
PACKAGES =
else
# Tools such as ninja and cmake are looked up on PATH.
IN_VENV = PATH="$(abspath $(VENV))/bin:$$PATH"
RUN = $(IN_VENV) $(VENV)/bin/python
SETUP = $(VENV)/.built
TOOLS = $(VENV)/.tools
DOCS = $(VENV)/.docs
BARE = $(VENV)/.python
PACKAGES = $(VENV)/.packages
endif

.PHONY: help demo puzzles plan test test-torch test-hf test-hub format lint docs wheel index hub release-check bench kernel-check gpu-check sanitize clean distclean current-python current-docs FORCE
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips in one environment get in each other's way.
.NOTPARALLEL:

help:
	@echo "make demo          train a GPT-2, a Llama or a mixture of experts, stock beside fused (ARGS=\"--model moe\")"
	@echo "make puzzles       the twelve Triton puzzles, solved by the ops (ARGS=\"--puzzle 5\")"
	@echo "make test          the test suite (ARGS=\"-k softmax\")"
	@echo "make test-torch    the suite against another torch (TORCH=2.13.0), in a venv of its own"
	@echo "make test-hf       the Hugging Face tests against another transformers (TRANSFORMERS=5.24.0)"
	@echo "make test-hub      the tests of make hub, with the package kernels"
	@echo "make format, lint  ruff and clang-format"
	@echo "make docs          the documentation, into docs/_build/html"
	@echo "make wheel         a wheel into dist/, checked in an empty environment"
	@echo "make index         an index of the wheels in dist/, for pip and for TORCHWELD_INDEX"
	@echo "make hub           the wheels in dist/ as a kernel for Hugging Face's kernels, in dist/hub"
	@echo "make release-check wheels for TORCHES=\"$(TORCHES)\", each checked, and their index"
	@echo "make bench         a family of benchmarks (ARGS=\"rows\"), or one call"
	@echo "make plan          how to divide GPUs over a model (ARGS=\"--model llama-3.1-8b --gpus 64\")"
	@echo "make kernel-check  registers, spills and build time of every kernel; needs nvcc, no GPU"
	@echo "make gpu-check     the test suite and the benchmarks on this machine's GPU"
	@echo "make sanitize      compute-sanitizer over every op's small calls (ARGS=\"--tools racecheck\")"
	@echo "make clean         remove what was built; distclean: $(VENV) too"
	@echo "PYTHON=python3.11 chooses the Python for $(VENV); VENV= uses the active one as it is."

# The demo's first line must not wait for kernels that nothing here can run.
ifneq ($(filter demo,$(MAKECMDGOALS)),)
ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'),0)
demo: export TORCHWELD_CPU_ONLY ?= 1
endif
endif
demo: $(SETUP)
	@$(RUN) examples/demo $(ARGS)

puzzles: $(SETUP)
	@$(RUN) examples/puzzles $(ARGS)

test: $(SETUP) $(TOOLS)
	@$(RUN) -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

# A copy of the tracked files with a venv and a build of its own: what is here stays as it is.
TORCH_COPY ?= build/torch-$(TORCH)
test-torch:
	@test -n "$(TORCH)" || { echo "test-torch needs a version: make test-torch TORCH=2.13.0" >&2; exit 1; }
	@mkdir -p $(TORCH_COPY) && cd $(TORCH_COPY) && rm -rf csrc tests && \
	  find . -path './.venv' -prune -o -path './build' -prune -o -name '*.py' -exec rm {} +
	@git ls-files -z | tar --create --null --files-from - | tar --extract -C $(TORCH_COPY)
	@sed -e '/^\(triton\|torchvision\|cuda-[a-z]*\|sympy\|networkx\|setuptools\)==/d' \
	  -e 's/^torch==.*/torch==$(TORCH)/' requirements/constraints.txt \
	  > $(TORCH_COPY)/requirements/constraints.txt
	@$(MAKE) --no-print-directory -C $(TORCH_COPY) test

# The tests $(3) in a venv $(1), with the packages $(2) above the packages and the build of $(VENV).
define TEST_ABOVE
@$(RUN) -m venv --without-pip $(1)
@$(RUN) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
  > "$$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
@$(RUN) -m pip --python $(1)/bin/python install --quiet --no-input --disable-pip-version-check $(2)
@$(1)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(3) $(ARGS)
endef

HF_VENV ?= build/transformers-$(TRANSFORMERS)
HF_PAGES ?= $(wildcard tests/test_fuse*.py tests/test_hf_*.py tests/test_quantize*.py tests/test_recipes.py)
HF_PACKAGES = transformers==$(TRANSFORMERS) $(addprefix --requirement ,$(wildcard requirements/transformers-$(TRANSFORMERS).txt))
test-hf: $(SETUP) $(TOOLS)
	@test -n "$(TRANSFORMERS)" || { echo "test-hf needs a version: make test-hf TRANSFORMERS=5.24.0" >&2; exit 1; }
	$(call TEST_ABOVE,$(HF_VENV),$(HF_PACKAGES),$(HF_PAGES))

test-hub: $(SETUP) $(TOOLS)
	$(call TEST_ABOVE,build/kernels,-r requirements/hub.txt -c requirements/constraints.txt,tests/test_hub.py)

format: $(TOOLS)
	@$(RUN) -m ruff check --fix --quiet .
	@$(RUN) -m ruff format .
	@$(IN_VENV) clang-format -i $(CXX_SOURCES)

lint: $(TOOLS)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(IN_VENV) clang-format --dry-run -Werror $(CXX_SOURCES)
	@$(RUN) tools/words.py
	@$(RUN) tools/circles.py
	@echo "lint: clean"

docs: $(SETUP) $(TOOLS) $(DOCS)
	@$(RUN) -m sphinx -b html -W --keep-going --quiet docs docs/_build/html $(ARGS)
	@echo "docs: docs/_build/html/index.html"

wheel: $(if $(PYTHON),,$(if $(TORCH),$(BARE),$(PACKAGES)))
	@$(WITH_CLOCK) $(or $(PYTHON),$(RUN)) tools/wheel.py \
	  $(if $(PYTHON),--python $(PYTHON)) $(if $(TORCH),--torch $(TORCH)) $(IN_PYTHONS)

index: $(BARE)
	@$(RUN) tools/index.py dist

hub: $(BARE)
	@$(RUN) tools/hub.py dist

# A wheel for each torch, each checked in an empty environment, and their index.
release-check: $(BARE)
	@$(WITH_CLOCK) for torch in $(TORCHES); do \
	  $(or $(PYTHON),$(RUN)) tools/wheel.py --torch $$torch $(if $(PYTHON),--python $(PYTHON)) \
	    $(IN_PYTHONS) || exit 1; \
	done
	@$(RUN) tools/index.py dist

bench: $(SETUP)
	@$(RUN) benchmarks/bench.py $(ARGS)

plan: $(SETUP)
	@$(RUN) benchmarks/plan.py $(ARGS)

kernel-check: $(SETUP)
	@$(RUN) benchmarks/kernel_check.py $(ARGS)

gpu-check: $(SETUP) $(TOOLS)
	@$(RUN) benchmarks/gpu_check.py $(ARGS)

sanitize: $(SETUP) $(TOOLS)
	@$(RUN) benchmarks/sanitize.py $(ARGS)

clean:
	rm -rf build dist python/*.egg-info python/torchweld/*.so python/torchweld/_build.json
	rm -rf docs/_build docs/_generated .pytest_cache .ruff_cache .hypothesis
	rm -f $(if $(strip $(VENV)),$(VENV)/.built)
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(if $(strip $(VENV)),$(VENV))

current-python:
	@$(RUN) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "torchweld needs Python 3.10 or newer, but $(RUN) is not" >&2; exit 1; }
	@$(RUN) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torchweld") is None)' || \
	  { echo "torchweld is not installed for $(RUN), and VENV= installs nothing" >&2; exit 1; }

current-docs: current-python
	@$(RUN) -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' \
	  sphinx myst_parser furo sphinx_copybutton || { echo "make docs needs packages that VENV= does" \
	  "not install: $(RUN) -m pip install -r requirements/docs.txt" >&2; exit 1; }

# A command with a line every 20 seconds, so that minutes of work are not silent minutes. A build
# writes a line for each compiled source, such as [37/180] csrc/module.cpp.
define WITH_CLOCK
mkdir -p build; rm -f build/progress; export TORCHWELD_PROGRESS="$(CURDIR)/build/progress"; \
( n=0; while sleep 20 >/dev/null 2>&1; do n=$$((n + 20)); \
  echo " " $$(tail -n 1 build/progress 2>/dev/null) "... $$n s"; done ) & \
clock=$$!; trap 'kill $$clock 2>/dev/null' EXIT; trap 'exit 130' INT TERM;
endef

# uv downloads and unpacks in parallel. It does not read pip's configuration, which may name a mirror
# or a proxy; pip installs what uv can't.
define INSTALL
{ $(RUN) -m pip install $(PIP_FLAGS) uv && $(RUN) -m uv pip install $(UV_FLAGS) $(1); } || \
  $(RUN) -m pip install $(PIP_FLAGS) $(1)
endef

# Before the long download, too.
define CHECK_COMPILER
compiler="$${CXX:-c++}"; command -v $${compiler%% *} >/dev/null || { \
  echo "torchweld needs a C++ compiler, but $$compiler was not found (on Debian: apt install g++)" >&2; \
  exit 1; }
endef

# What is on PATH may be a shim of pyenv that only prints an error, so every candidate must run.
# 3.12 first: most of the testing is done there.
$(VENV)/.python:
	@older= ; lacking= ; found= ; \
	for python in $(or $(PYTHON),$(foreach v,3.12 3.13 3.11 3.10 3.14,python$(v) \
	    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(v).*/bin/python3) python3 python); do \
	  version=$$("$$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) \
	    || continue; \
	  if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then \
	    older="$$version ($$python)"; continue; fi; \
	  if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	    lacking="$$python lacks the venv module (on Debian: apt install python3-venv)"; continue; fi; \
	  if ! "$$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists( \
	      os.path.join(sysconfig.get_paths()["include"], "Python.h")))'; then \
	    lacking="$$python lacks Python.h (on Debian: apt install python3-dev)"; continue; fi; \
	  found="$$python"; break; \
	done; \
	if [ -z "$$found" ]; then \
	  if [ -n "$$lacking" ]; then echo "torchweld can't be built: $$lacking" >&2; \
	  elif [ -n "$$older" ]; then \
	    echo "torchweld needs Python 3.10 or newer, but found only $$older" >&2; \
	  else echo "torchweld needs Python 3.10 or newer, but found none$(if $(PYTHON), at $(PYTHON))" >&2; fi; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with Python $$version"; \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/.packages: requirements/build.txt requirements/demo.txt requirements/constraints.txt | $(VENV)/.python
	@$(CHECK_COMPILER)
	@echo "Installing PyTorch, transformers and the other pinned packages (up to 5 GB; 1 to 10 minutes)"
	@$(WITH_CLOCK) $(call INSTALL,-r requirements/build.txt -r requirements/demo.txt)
	@touch $@

$(VENV)/.tools: requirements/test.txt requirements/recipes.txt requirements/constraints.txt | $(VENV)/.python
	@echo "Installing the pinned tools for tests and style"
	@$(WITH_CLOCK) $(call INSTALL,-r requirements/test.txt)
	@touch $@

$(VENV)/.docs: requirements/docs.txt requirements/constraints.txt | $(VENV)/.python
	@echo "Installing the pinned tools for the documentation"
	@$(WITH_CLOCK) $(call INSTALL,-r requirements/docs.txt)
	@touch $@

# An editable install: changes in Python need no build. Objects stay in build/, so that a second
# build compiles only what changed.
$(VENV)/.built: $(BUILD_INPUTS) $(VENV)/.packages $(if $(wildcard python/torchweld/_ops*.so),,FORCE)
	@$(CHECK_COMPILER)
	@echo "Building torchweld$(if $(filter 1,$(TORCHWELD_CPU_ONLY)), for the CPU alone) (1 to 15 minutes the first time)"
	@$(WITH_CLOCK) $(RUN) -m pip install $(PIP_FLAGS) --no-build-isolation --no-deps -e .
	@touch $@
