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

.PHONY: serve test check format bench clean

# Serves the starter model on http://127.0.0.1:8000, e.g. `make serve ARGS="--port 9000"`.
serve: $(VENV)/.installed
	@exec $(BIN)/appliance serve $(ARGS)

# Everything, e.g. `make test ARGS="tests/engine -x"`.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

# Style, types, import directions and file sizes. mypy sees the package only as it is installed, hence the wheel.
check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/check
	$(BIN)/pip install --quiet --no-deps --target build/check .
	cd build/check && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p appliance
	$(BIN)/python -m pytest -q tests/test_structure.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Speed through HTTP on this machine; prints the figures that docs/performance.md quotes.
bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/serving.py

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
