# All targets use .venv, which the first target that needs it creates.
PYTHON ?=
VENV := .venv
FLOOR := build/floor
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
RAY_STAMP := $(VENV)/.installed-ray
DOCS_STAMP := $(VENV)/.installed-docs
NIXL_STAMP := $(VENV)/.installed-nixl
TRACKING_STAMP := $(VENV)/.installed-tracking
SETUP_FILES := requirements/cpu.txt requirements/torch_build.py pyproject.toml
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: FORCE install-packages help setup demo demo-agent demo-llm docs gpu-check test test-fast test-floor test-engines \
	test-all lint format audit-cuda engines clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## create .venv from requirements/cpu.txt, with the newest fitting Python (or PYTHON=...)

# A stamp holds digests of the files that it was made of, so that a checkout that only sets their times installs nothing
$(STAMP): FORCE
	@test -z "$(PYTHON)" || sh requirements/python.sh $(VENV) "$(PYTHON)" > /dev/null
	@changed="$$(sh requirements/changed.sh $@ $(SETUP_FILES))"; \
	case "$$changed" in \
	"") exit 0 ;; \
	pyproject.toml) echo "Changed since the last installation: pyproject.toml. Installing hybrid3d alone"; \
		$(PIP) --no-deps --no-build-isolation -e . ;; \
	*) test ! -e $@ || echo "Changed since the last installation: $$changed"; \
		$(MAKE) --no-print-directory install-packages ;; \
	esac && sha256sum $(SETUP_FILES) > $@

install-packages:
	@python="$$(sh requirements/python.sh $(VENV) "$(PYTHON)")" && \
	{ test -x $(BIN)/python || "$$python" -m venv $(VENV); }
	@echo "Installing the PyTorch build that pip selects, and its dependencies, into $(VENV)"
	@$(PIP) -c requirements/cpu.txt torch || { $(BIN)/python requirements/torch_build.py --failed; exit 1; }
	@$(BIN)/python requirements/torch_build.py
	@echo "Installing $$(grep -c '^[^#].*==' requirements/cpu.txt) pinned packages into $(VENV): some minutes, 3 to 6 GB"
	@$(PIP) --no-deps -r requirements/cpu.txt
	@$(PIP) --no-deps --no-build-isolation -e .

# $(call install,FILE,WHAT FOR): install the packages of a file, if it is not the one that they were installed from
define install
	@test -z "$$(sh requirements/changed.sh $@ $(1))" || { \
		test ! -e $@ || echo "Changed since the last installation: $(1)"; \
		echo "Installing $$(grep -c '^[^#].*==' $(1)) pinned packages $(2) into $(VENV)"; \
		$(PIP) --no-deps -r $(1) && sha256sum $(1) > $@; }
endef

demo: $(STAMP) ## train a small model on this machine's CPU, from data to curves
	@$(BIN)/python examples/demo.py

demo-agent: $(STAMP) ## train a small model with the answers of an agent that has a calculator
	@$(BIN)/python examples/demo_agent.py

demo-llm: $(DEMO_STAMP) ## train a real language model of 135 million parameters on this machine's CPU
	@$(BIN)/python examples/demo_llm.py

$(DEMO_STAMP): FORCE | $(STAMP)
	$(call install,requirements/demo.txt,for make demo-llm (0.1 GB))

$(RAY_STAMP): FORCE | $(STAMP)
	$(call install,requirements/ray.txt,for the tests on Ray (0.2 GB))

$(NIXL_STAMP): FORCE | $(STAMP)
	$(call install,requirements/nixl.txt,for the tests over NIXL (0.1 GB))

$(TRACKING_STAMP): FORCE | $(STAMP)
	$(call install,requirements/tracking.txt,for the tests of trackers (0.2 GB))

docs: $(DOCS_STAMP) ## make the site of docs/ in build/site, with warnings, such as broken links, as errors
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

$(DOCS_STAMP): FORCE | $(STAMP)
	$(call install,requirements/docs.txt,for the site (0.1 GB))

# With .venv where there is one, else with whatever is installed, from these sources
gpu-check: ## check what this machine's GPU does: 20 minutes or less (ARGS="--only NAME --json OUT")
	@PYTHONPATH=src:tests$${PYTHONPATH:+:$$PYTHONPATH} $(if $(wildcard $(BIN)/python),$(BIN)/python,$(or $(PYTHON),python3)) -m pytest -c tests/gpu/pytest.ini tests/gpu $(ARGS)

unexport PYTHONDONTWRITEBYTECODE  # else each of a thousand processes compiles hybrid3d anew

test: lint $(TRACKING_STAMP) ## lint, and all tests except the slow ones (what CI runs)
	$(BIN)/pytest -m "not slow" $(TWO_AT_A_TIME) --durations=40

test-fast: $(STAMP) ## the tests that start no processes and import no engine: 1 to 3 minutes
	$(BIN)/pytest -m "not slow and not engines and not processes and not further" $(TWO_AT_A_TIME)

test-all: lint docs $(DEMO_STAMP) $(RAY_STAMP) $(NIXL_STAMP) $(TRACKING_STAMP) ## lint, and all tests
	$(BIN)/pytest -m "not slow" $(TWO_AT_A_TIME)
	$(BIN)/pytest -m slow --durations=40
	@$(MAKE) --no-print-directory test-floor

test-floor: ## the tests of engines with the oldest Python and Megatron-Core, in build/floor
	@mkdir -p $(dir $(FLOOR))
	@$(MAKE) --no-print-directory test-engines VENV=$(FLOOR) PYTHON=3.11

test-engines: $(STAMP)
	$(BIN)/pytest -m "engines and not slow" $(TWO_AT_A_TIME)

lint: $(STAMP) ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit-cuda: $(STAMP) ## check what runs on CUDA, without a GPU: downloads several GB into build/audit; not part of the tests
	PYTHONPATH=src:tests $(BIN)/python -m audit $(AUDIT)

engines: $(STAMP) ## prove pairs of versions of the engines: downloads several GB into build/engines (ENGINES="--only TEXT")
	PYTHONPATH=src:tests $(BIN)/python -m pairs $(ENGINES)

format: $(STAMP) ## sort imports, fix what ruff can fix, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove build/ and caches; keeps .venv and runs/
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +
