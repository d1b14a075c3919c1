# `make run` shows the engine at work, `make serve` serves it, `make test` runs every check. Each sets up the virtual
# environment that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most of them never are.
INSTALL := install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
PIP := $(BIN)/python -m pip $(INSTALL)
# Without an isolated environment for each build the tools have the versions of constraints.txt.
EDITABLE := $(PIP) --no-build-isolation --config-settings=wheel.cmake=false --editable
CMAKE := $(BIN)/cmake
# Instruction sets that kernels are compiled for: all, or native, the best that this machine has.
ISAS := all
CONFIGURE := $(CMAKE) -S native -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DINFINILM_ISAS=$(ISAS)
# Kernels are compiled while packages are installed and the model is fetched.
PREPARE := $(MAKE) --no-print-directory --jobs=2 ISAS=native kernels
SANITIZED := build/sanitize
CLIENTS_VENV := .venv-clients

.PHONY: run serve docs model-table test test-cluster format format-check lint types tests fuzz test-clients native sanitize screenshots \
	fetch kernels wheels aarch64 clean

run:
	@$(PREPARE) fetch
	@$(TORCH_INSTEAD)
	$(BIN)/infinilm generate --chat --max-tokens 64 \
		"What is the capital of France, and what is it known for?" \
		"Write a haiku about the sea." \
		"Explain in two sentences why the sky is blue."

serve:
	@$(PREPARE) $(VENV)/.run
	@$(TORCH_INSTEAD)
	$(BIN)/infinilm serve $(SERVE)

# The reference of the public API, from its docstrings: build/docs/index.html.
docs: $(VENV)/.dev
	$(BIN)/python docs/api_reference.py build/docs

# The table of model families in docs/models.md, with differences from transformers that are measured anew.
model-table: $(VENV)/.dev
	$(BIN)/python docs/model_table.py

test:
	$(MAKE) --jobs=2 --output-sync format-check lint types native
	$(MAKE) tests

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: $(VENV)/.dev
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

tests: native $(VENV)/.dev
	$(BIN)/python -m pytest

# The cluster's slower tests: updates, scaling, restarts, hit rates, the death of the driver.
test-cluster: native $(VENV)/.dev
	INFINILM_TEST_CLUSTER=1 $(BIN)/python -m pytest -p no:xdist --override-ini=addopts= --timeout 900 -q tests/cluster tests/batch

# Mixtures of requests against each request alone: tests/fuzz. `make fuzz FUZZ="--cases 5000 --seed 1"`
FUZZ ?= --cases 600
fuzz: native $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ)

# Clients of OpenAI's API against a server: a table of calls and results. They are installed in an environment of their own.
# `make test-clients CLIENTS="llm instructor"` runs some of them.
test-clients: native $(VENV)/.dev $(CLIENTS_VENV)/.clients
	$(BIN)/python tests/clients/run_clients.py --python $(CLIENTS_VENV)/bin/python $(CLIENTS)

$(CLIENTS_VENV)/.clients: pyproject.toml constraints-clients.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	@echo "Installing the clients into $(CLIENTS_VENV) …"
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"], sep="\n")' \
		>$(CLIENTS_VENV)/requirements.txt
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-clients.txt \
		--requirement $(CLIENTS_VENV)/requirements.txt
	touch $@

# The pictures of the chat page in docs/, with answers of the embedded model. Needs Chromium.
screenshots: native $(VENV)/.dev
	SCREENSHOTS=docs $(BIN)/python -m pytest -p no:xdist --override-ini=addopts= -k test_screenshots tests/server/test_page.py

# The kernels, as far as they have changed. A machine that can't compile gets torch instead; an error in the code stops here.
# Ninja would otherwise try to share the jobs of a parallel make, which doesn't pass them on to a recipe like this.
native: $(VENV)/.run kernels

kernels: $(VENV)/.tools
	@mkdir -p build
	@rm -f build/native.failed
	@unset MAKEFLAGS; if $(CONFIGURE) -B build/native >build/native.log 2>&1; then \
		$(CMAKE) --build build/native -- --quiet && $(CMAKE) --install build/native >/dev/null; \
	else \
		rm -rf build/native infinilm/_native.*.so; \
		touch build/native.failed; \
		echo "The native kernels can't be built here (build/native.log says why): InfiniLM runs on torch alone."; \
	fi

TORCH_INSTEAD = if [ -e build/native.failed ]; then $(EDITABLE) '.[torch]'; fi

# The embedded model, with its progress, unless it is in the cache.
fetch: $(VENV)/.run
	@$(BIN)/python -c 'from infinilm.loading.sources import pull; pull(None)'

# The kernels' tests, on a build that stops at the first bad memory access or undefined behaviour.
# The C++ library is preloaded along with the sanitizer because Python itself doesn't link it.
sanitize: $(VENV)/.dev
	CXX=$(CXX) $(CONFIGURE) -B $(SANITIZED) -DINFINILM_SANITIZE=ON
	$(CMAKE) --build $(SANITIZED)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	INFINILM_NATIVE="$$(ls $(abspath $(SANITIZED))/_native.*)" \
	$(BIN)/python -m pytest -p no:xdist --override-ini=addopts= --quiet --capture=sys tests/native

# Wheels for Linux on x86-64, which need no compiler where they are installed: dist/. Each is checked and tried out.
wheels:
	$(PYTHON) tools/build_wheels.py

# The kernels on an emulated aarch64, whose results must have the same bits as here. Needs Debian's g++-aarch64-linux-gnu and
# qemu-user.
CHECKSUMS := native/checksums.cpp $(filter-out native/checksums.cpp %module.cpp,$(wildcard native/*.cpp))
CHECKSUM_FLAGS := -std=c++17 -O2 -fno-math-errno -fno-trapping-math -ffp-contract=off -Wno-psabi -static -pthread \
	-DINFINILM_ISA=generic -DINFINILM_HAS_GENERIC
aarch64:
	@mkdir -p build/aarch64
	aarch64-linux-gnu-g++ $(CHECKSUM_FLAGS) $(CHECKSUMS) -o build/aarch64/theirs
	$(CXX) $(CHECKSUM_FLAGS) $(CHECKSUMS) -o build/aarch64/ours
	qemu-aarch64 build/aarch64/theirs >build/aarch64/theirs.txt
	build/aarch64/ours | diff - build/aarch64/theirs.txt
	@echo "$$(wc -l <build/aarch64/theirs.txt) results have the same bits"

# This Python's own pip, which puts a newer and faster one into the environment, is quicker than ensurepip.
TOOLS := pip scikit-build-core nanobind cmake ninja
$(VENV)/.tools: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("InfiniLM needs Python 3.11 to 3.13; set PYTHON=…" if not (3, 11) <= sys.version_info[:2] <= (3, 13) else 0)'
	@echo "Installing into $(VENV) …"
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python $(INSTALL) $(TOOLS) || { $(BIN)/python -m ensurepip && $(PIP) $(TOOLS); }
	touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.tools
	$(EDITABLE) '.[serve,structured]'
	touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Installing the test tools into $(VENV) …"
	$(EDITABLE) '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # tests start many processes; some packages have files that are no Python
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist infinilm/_native.*.so
