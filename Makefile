# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips must not write to one environment at a time, nor two builds to build/, also under `make -j`.
.NOTPARALLEL:
.PHONY: help train test bench proof lint check patch clean

# The Python that makes the environments, and the torch that goes into .venv. A torch of another kind is chosen by
# TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu' and a `make clean` before.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PRE_COMMIT := pre-commit==4.6.2

# These come from the command line only: an OPT or ENGINE in the environment is meant for something else.
ENGINE = bf16
OPT = muon
STEPS =
STATS =
ARGS =

ENGINES := $(sort $(notdir $(basename $(wildcard examples/configs/*.json))))
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
# One rank a GPU, since NCCL refuses two on one; two on CPUs.
RANKS = $(if $(filter 0,$(GPUS)),2,$(GPUS))

ifeq ($(filter $(ENGINE),$(ENGINES)),)
$(error ENGINE=$(ENGINE) is not one of: $(ENGINES))
endif
ifeq ($(filter $(OPT),muon adamw),)
$(error OPT=$(OPT) is not one of: muon adamw)
endif

# Of the scripts in benchmarks/, those that print a table of this fork's, alone or beside others.
BENCHES = plan newton_schulz_accuracy newton_schulz_speed engines others

VENV := .venv
BIN := $(VENV)/bin
LINT_VENV := .venv-lint
PIP_INSTALL = -m pip --disable-pip-version-check install

# What the installed tree is made of. Our own files under deepspeed/ are linked into it, so a change of theirs needs no
# new installation.
FORK := UPSTREAM pyproject.toml $(wildcard setup.py forkbuild/*.py patches/*.py patches/seams.lock requirements/*.txt)

# DeepSpeed compiles its CPU kernels at first use, with the ninja that pip installs. They are kept by name only, so each
# environment needs its own: those of another DeepSpeed would be compiled again and again in turn.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
export PIP_ROOT_USER_ACTION := ignore
ifeq ($(GPUS),0)
export DS_ACCELERATOR ?= cpu
endif

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile
	@echo 'ENGINE: $(ENGINES). OPT: muon adamw. RANKS: processes, here $(RANKS).'

# A compilation that was killed leaves a lock that the next one waits for, for ever and without a word. None takes so long.
UNLOCK = test ! -d $(TORCH_EXTENSIONS_DIR) || find $(TORCH_EXTENSIONS_DIR) -name lock -mmin +30 -delete

train: $(VENV)/.train ## train the example language model: [ENGINE=bf16] [OPT=muon] [STEPS=n] [RANKS=n] [STATS=1]
	@$(UNLOCK)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
		examples/train.py --engine $(ENGINE) --opt $(OPT) $(if $(STEPS),--steps $(STEPS)) $(if $(STATS),--stats)

test: $(VENV)/.test ## run the whole test suite: [ARGS='-k name']
	@$(UNLOCK)
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python -m pytest -q tests $(ARGS)

bench: $(VENV)/.test ## run the benchmarks, each of which prints a table: [BENCHES="plan engines"]
	set -x; for script in $(BENCHES); do $(BIN)/python "benchmarks/$$script.py"; done

proof: $(VENV)/.test ## show that the regressions fail on stock DeepSpeed 0.19.7 and pass here, and that its checkpoints load
	$(BIN)/python benchmarks/proof.py
	$(BIN)/python benchmarks/proof_checkpoints.py

lint: $(LINT_VENV)/.made ## run all checks of .pre-commit-config.yaml on all tracked files
	$(LINT_VENV)/bin/pre-commit run --all-files --show-diff-on-failure

check: $(VENV)/.tools ## check that every edit in patches/ applies to the pinned DeepSpeed release
	$(BIN)/python -m forkbuild check

patch: $(VENV)/.tools ## write the changes as a series for `git am` to build/patches/
	$(BIN)/python -m forkbuild export

clean: ## remove the environments and all build products; results in runs/ stay
	rm -rf $(VENV) $(LINT_VENV) build dist *.egg-info .pytest_cache .hypothesis

# Each stamp is written when its step has succeeded, so an interrupted installation is taken up again.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 13) or sys.exit( \
		f"Python 3.10, 3.11 or 3.12 is needed, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# All that `python -m forkbuild` needs. The fork itself cannot be installed while an edit does not apply.
$(VENV)/.tools: $(VENV)/.made requirements/requirements-test.txt
	$(BIN)/python $(PIP_INSTALL) "$$(grep ast-grep-py requirements/requirements-test.txt)"
	touch $@

$(VENV)/.torch: $(VENV)/.made
	$(BIN)/python $(PIP_INSTALL) $(TORCH)
	touch $@

$(VENV)/.train: $(VENV)/.torch $(FORK)
	$(BIN)/python $(PIP_INSTALL) --editable '.[example]'
	@# Else the ranks of the first run would compile it, all but one of them waiting.
	$(BIN)/python -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()'
	touch $@

$(VENV)/.test: $(VENV)/.train
	$(BIN)/python $(PIP_INSTALL) --editable '.[example,test]'
	@# Likewise: a dozen sources, minutes on a small machine, longer than a test waits for its ranks.
	$(BIN)/python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder as Aio, CPUAdamBuilder as Adam; \
		Adam().load(); Aio().is_compatible() and Aio().load()'
	touch $@

$(LINT_VENV)/.made: Makefile
	$(PYTHON) -m venv $(LINT_VENV)
	$(LINT_VENV)/bin/python $(PIP_INSTALL) --quiet $(PRE_COMMIT)
	touch $@
