# make demo | make test | make docs | make setup. Nothing else is needed on a machine with Python >= 3.11, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNS := $(VENV)/.runs
CUDA := .cuda
RELEASE := .release
RELEASE_TOOLS := build==1.6.1 cyclonedx-bom==7.5.0 pip-audit==2.10.1 setuptools==84.2.1
SERVE ?= 1
PORT ?= 8501
export STREAMLIT_BROWSER_GATHER_USAGE_STATS = false
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Where bytecode is not written, each process that a test starts compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE
export NO_MKDOCS_2_WARNING = 1

.PHONY: setup demo docs test static lint types layers unit browser prometheus postgres compiler kills crashes versions compat test-cuda install-check release-check clean

setup: $(STAMP)

$(STAMP): requirements.txt pyproject.toml setup.py training_harness/bootstrap/tidegauge.pth
	$(check_python)
	@echo "Installing the pinned packages (about a minute)"
	@$(BIN)/python -m pip install --quiet --progress-bar on -r requirements.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# What running needs, without the tools that test: the same pins, in half the time.
$(RUNS): requirements.txt pyproject.toml setup.py training_harness/bootstrap/tidegauge.pth
	$(check_python)
	@echo "Installing what the demo needs (about a minute)"
	@$(BIN)/python -m pip install --quiet --quiet --no-compile --constraint requirements.txt --editable '.[app,jobs]'
	@touch $@

define check_python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed, $(PYTHON) is $$($(PYTHON) --version): set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
endef

PHOTOGRAPHS := 420

# One worker for large photographs: training waits, and the card predicts what another setting gives. The step gets
# one thread, which leaves a core to the worker on the smallest machine. SERVE=0 leaves the dashboard out.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(RUNS))
	@$(BIN)/python -P -m training_harness.jobs.photographs $(PHOTOGRAPHS)
	@OMP_NUM_THREADS=1 $(BIN)/tidegauge job $(if $(filter 1,$(SERVE)),--dashboard --port $(PORT)) images --num-workers 1 --batch-size 16 \
		--limit $(PHOTOGRAPHS) --epochs 3

# The documentation as a site, in site/.
docs: setup
	$(BIN)/mkdocs build --quiet --clean
	@echo "Read it on http://localhost:8000: $(BIN)/python -m http.server --directory site"

test: static browser prometheus postgres compiler unit

static: setup
	@$(MAKE) --no-print-directory -j2 -O lint types layers

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/declared_pages.py --check
	$(BIN)/python scripts/language_check.py

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports --no-cache

browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
		|| echo "chromium is missing and can't be installed here: the browser tests will be skipped" >&2

# Unpacked, not installed (19 MB, without the service that the package would start): no rights are needed.
prometheus: setup
	@command -v promtool >/dev/null || test -x $(VENV)/prometheus/usr/bin/promtool \
		|| { cd $(VENV) && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb prometheus && rm prometheus_*.deb; } \
		|| echo "prometheus is missing and can't be downloaded here: its tests will be skipped" >&2

# For the shared store; its own service is not started.
postgres:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends postgresql openssl iproute2; } \
		|| echo "postgresql is missing and can't be installed here: the tests of the shared store will be skipped" >&2

# Three at once on two cores: a third of their time, tests wait for trainings that sleep.
unit: setup
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/python -m pytest -m alone

# The random kills of tests/integration/test_kills.py, 50 times (about 8 minutes).
kills: setup
	TIDEGAUGE_KILLS=50 $(BIN)/python -m pytest -n 2 tests/integration/test_kills.py

# 500 kills of an ingester in the middle of what it does (17 minutes of CPU). It prints its seed, and what to give to
# go on after a failure: make crashes CRASHES="--seed N --begin ROUND"
crashes: setup
	$(BIN)/python tests/integration/store_crashes.py $(CRASHES)

# The loader hooks against the oldest supported, a middle and the newest torch (about 20 minutes, up to 16 GB).
versions: setup
	$(BIN)/python scripts/versions.py

# Trainers of other libraries, bare and attached, against an independent count; writes the table of
# docs/compatibility.md (about 10 minutes, 350 MB).
compat: setup
	$(BIN)/python tests/compat/run.py $(COMPAT)

# The CUDA paths on simulated devices (tests/cuda_sim), with PyTorch's CUDA build in an environment of its own (9 GB;
# about 10 minutes to install and 20 to run). A local index of CPU builds would win over the CUDA build.
test-cuda: $(CUDA)/.installed compiler
	$(CUDA)/bin/python -m pytest -n 2 tests/cuda_sim

$(CUDA)/.installed: requirements.txt pyproject.toml
	@test -x $(CUDA)/bin/python || $(PYTHON) -m venv $(CUDA)
	@env -u PIP_EXTRA_INDEX_URL -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(CUDA)/bin/python -m pip install --quiet \
		$$(grep '^torch==' requirements.txt) 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*'
	@grep -v '^torch==' requirements.txt > $(CUDA)/requirements.txt
	@$(CUDA)/bin/python -m pip install --quiet -r $(CUDA)/requirements.txt
	@$(CUDA)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

compiler:
	@command -v g++ >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends g++; } \
		|| echo "g++ is missing and can't be installed here: the tests of NVML will be skipped" >&2

# The base install and the collector's in fresh environments, used as a user would (about 2 minutes, 1 GB).
install-check: setup
	$(BIN)/python scripts/install_check.py

# The last commit: two builds that must be equal, the wheel in use, its bill of materials, known vulnerabilities. The
# result is in dist/ (about 2 minutes, 1 GB).
release-check: $(RELEASE)/.installed
	$(RELEASE)/bin/python scripts/release_check.py

$(RELEASE)/.installed: Makefile
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install --quiet $(RELEASE_TOOLS)
	@touch $@

clean:
	rm -rf $(VENV) $(CUDA) $(RELEASE) .versions .compat test-artifacts dist
