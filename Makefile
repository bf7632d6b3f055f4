# `make serve` runs the main job on a fresh clone, `make test` proves the software sound.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD_INPUTS := pyproject.toml kernels/CMakeLists.txt $(wildcard kernels/*/*.cpp)

# A venv knows its own place, so after the clone was moved it is made anew.
ifneq ($(wildcard $(VENV)/.installed),)
ifneq ($(shell $(BIN)/python -c 'import appliance; print("sound")' 2>/dev/null),sound)
$(shell rm -f $(VENV)/.installed $(VENV)/.installed-dev)
endif
endif

.PHONY: serve test simulate check sanitize gpu-report format bench clean

# Serves the starter model on http://127.0.0.1:8000, e.g. `make serve ARGS="--port 9000"`.
serve: $(VENV)/.installed
	@exec $(BIN)/appliance serve $(ARGS)

# Everything, e.g. `make test ARGS="tests/engine -x"`.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

# Far more of tests/sim than the tests run: 50 seeds of random traffic through the scheduler and KV memory, some minutes.
simulate: $(VENV)/.installed-dev
	PYTHONPATH=tests $(BIN)/python -m sim $(ARGS)

# Style, types, import directions and file sizes. mypy sees the package only as it is installed, hence the wheel.
check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/check
	$(BIN)/pip install --quiet --no-deps --target build/check .
	cd build/check && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p appliance
	$(BIN)/python -m pytest -q tests/test_structure.py

# The native library under sanitizers (g++, cmake, Linux): accesses and undefined behaviour while Python's tests of it run,
# races in a program of its own. The library is looked for where pytest stands; -S keeps the editable install out, and what
# sanitizers say before they end the process is not captured.
SANITIZE := build/sanitize
NATIVE_TESTS := $(addprefix $(CURDIR)/tests/,kernels/test_linear_cpu.py kernels/test_repack.py engine/test_model_golden.py \
                engine/test_families_moe.py)
sanitize: export CMAKE_BUILD_PARALLEL_LEVEL := $(shell nproc)
sanitize: $(VENV)/.installed-dev
	cmake -S kernels -B $(SANITIZE)/thread -DCMAKE_BUILD_TYPE=Release -DAPPLIANCE_SANITIZE=thread
	cmake --build $(SANITIZE)/thread --target threads
	$(SANITIZE)/thread/threads
	cmake -S kernels -B $(SANITIZE)/address -DCMAKE_BUILD_TYPE=Release -DAPPLIANCE_SANITIZE=address,undefined
	cmake --build $(SANITIZE)/address --target threads appliance_native
	$(SANITIZE)/address/threads
	rm -rf $(SANITIZE)/package
	$(BIN)/pip install --quiet --no-deps --target $(SANITIZE)/package --config-settings=wheel.cmake=false .
	cmake --install $(SANITIZE)/address --prefix $(SANITIZE)/package
	export PYTHONPATH=$$($(BIN)/python -c 'import sys; print(*filter(None, sys.path), sep=":")') \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1; \
	preload="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)"; \
	cd $(SANITIZE)/package || exit; \
	tests() { LD_PRELOAD="$$preload" $(CURDIR)/$(BIN)/python -S -m pytest -q --capture=sys -c $(CURDIR)/pyproject.toml "$$@"; }; \
	tests $(CURDIR)/tests/kernels/test_attention_cpu.py & \
	tests $(NATIVE_TESTS); code=$$?; wait $$! && exit $$code

# The GPU's kernels compiled without one, by the lowest and the highest Triton that torch brings; fails where they got worse
# than benchmarks/gpu_report/kept.json says.
TRITONS := 3.6.0 3.7.1
gpu-report: $(TRITONS:%=build/triton/%)
	code=0; for triton in $(TRITONS); do \
	    PYTHONPATH=build/triton/$$triton $(BIN)/python -m benchmarks.gpu_report $(ARGS) || code=1; \
	done; exit $$code

build/triton/%: | $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --no-deps --target $@ triton==$*

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Speed through HTTP on this machine; prints the figures that docs/performance.md quotes.
bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/serving.py $(ARGS)

clean:
	rm -rf $(VENV) build .cache

$(VENV)/.installed: $(BUILD_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, found %d.%d; choose another one: make PYTHON=python3.12" % sys.version_info[:2] or 0)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --editable '.[dev]'
	@touch $@
