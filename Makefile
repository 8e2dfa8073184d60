# Needs make and Python >= 3.10, nothing else: everything goes into .venv and .mpi of this folder.
PYTHON ?= python3
NP ?= 2
FRAMEWORK ?= torch
# Keras works on the backend that KERAS_BACKEND says; without it, on torch.
DEMO = $(FRAMEWORK)$(if $(filter keras,$(FRAMEWORK)),-$(or $(KERAS_BACKEND),torch))
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-clusters quick lint fix bench docs wheel floors clean
inputs := pyproject.toml khorovod-ipu/pyproject.toml constraints.txt scripts/install

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

demo: .venv/.demo-ready-$(DEMO) ## install, then train the digits example on NP=2 processes (FRAMEWORK=torch, tensorflow, keras or jax)
	scripts/demo $(FRAMEWORK) $(NP) $(ARGS)

test: .venv/.test-ready ## everything: formatting, linting, types, all tests (ARGS="-k name" goes to pytest)
	scripts/check
	scripts/test $(ARGS)

test-clusters: .venv/.clusters-ready ## tests with real schedulers; installs them (root, Debian) or says what is missing
	scripts/test-clusters $(ARGS)

quick: .venv/.test-ready ## in about two minutes: what needs no processes, and a little of what real ranks do
	scripts/test -m "not slow" $(ARGS)

lint: .venv/.test-ready ## formatting, linting and types only
	scripts/check

fix: .venv/.test-ready ## format, and mend what ruff can mend
	scripts/fix

bench: .venv/.test-ready ## measure the collectives on this machine
	scripts/bench $(ARGS)

docs: .venv/.docs-ready ## build the documentation site in site/; warnings are errors
	scripts/docs

wheel: .venv/.test-ready ## build the wheel, install it in a fresh environment and run a smoke test
	scripts/floors wheel

floors: .venv/.test-ready ## a smoke suite on the oldest supported Python and frameworks (minutes, downloads)
	scripts/floors

clean: ## remove what make installed, and caches
	rm -rf .venv .mpi site .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

demo-extras-torch := torch
demo-extras-tensorflow := tensorflow-cpu
demo-extras-keras-torch := keras,torch
demo-extras-keras-tensorflow := keras,tensorflow-cpu
demo-extras-keras-jax := keras,jax
demo-extras-jax := jax
.venv/.demo-ready-%: $(inputs)
	PYTHON=$(PYTHON) scripts/install $(demo-extras-$*),examples
	@touch $@

.venv/.docs-ready: .venv/.clusters-ready
	PYTHON=$(PYTHON) scripts/install docs
	@touch $@

.venv/.clusters-ready: .venv/.test-ready
	PYTHON=$(PYTHON) scripts/install torch,examples,dev,clusters
	@touch $@

.venv/.test-ready: $(inputs) scripts/install-mpi
	PYTHON=$(PYTHON) scripts/install torch,examples,dev
	scripts/install-mpi
	@touch $@ $(foreach demo,torch tensorflow jax keras-torch keras-tensorflow keras-jax,.venv/.demo-ready-$(demo))
