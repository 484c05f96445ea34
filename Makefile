# `make train` and `make test` set everything up on a fresh machine and reuse it the next time.
VENV    ?= .venv
NPU_VENV ?= .venv-npu
MS_VENV ?= .venv-ms
DEVICE  ?= cpu
PYTHON  ?= python3
NPROC   ?= 2
API     ?= functional
NAME    ?= cp_fsdp
ARGS    ?=
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
NPU_READY := $(NPU_VENV)/.ready
MS_READY := $(MS_VENV)/.ready

export OMP_NUM_THREADS ?= 1
export TORCH_DEVICE_BACKEND_AUTOLOAD = 0
export GLOG_v ?= 3

.PHONY: train example test test-torch test-npu-sim train-ms test-ms parity lint types bench setup clean

setup: $(READY)

$(READY): requirements.txt pyproject.toml
	$(call environment,$(VENV),requirements.txt)

$(NPU_READY): requirements-npu.txt pyproject.toml
	$(call environment,$(NPU_VENV),requirements-npu.txt)

$(MS_READY): requirements-mindspore.txt pyproject.toml
	$(call environment,$(MS_VENV),requirements-mindspore.txt)

# A virtual environment with exactly what a file of requirements lists, and this project.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
	  { echo "the pinned requirements are for Python 3.11 and 3.12; name one: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check -r $(2)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(1)/.ready
endef

# The main job: a byte-level transformer on the Python standard library's sources. ARGS="--help" lists its options.
# API=facade runs the same training with fully_shard. DEVICE=npu-sim: its first steps on torch_npu over a simulated CANN.
ifeq ($(DEVICE),npu-sim)
train: $(NPU_READY)
	$(NPU_VENV)/bin/python -m tests.npu_sim.run --nproc $(NPROC) examples/torch/train_gpt.py --api $(API) --device npu \
	  --out runs/npu-sim --steps 20 --log-every 1 --valid-every 0 --valid-windows 8 --sample-bytes 20 --save-every 0 $(ARGS)
else
train: $(READY)
	$(BIN)/python -m torch.distributed.run --standalone --nproc_per_node=$(NPROC) \
	  examples/torch/train_gpt.py --api $(API) --device $(DEVICE) $(ARGS)
endif

# NAME is tp_fsdp, cp_fsdp or moe_ep_fsdp: sharding together with another parallelism, on four CPU processes.
example: $(READY)
	$(BIN)/python -m torch.distributed.run --standalone --nproc_per_node=4 examples/torch/$(NAME).py $(ARGS)

# Everything that must pass: with torch, then on torch_npu over a simulated CANN and with MindSpore, side by side.
# ARGS are pytest's, for one of the three: make test-torch ARGS=tests/test_facade.py
test: test-torch
	$(MAKE) -j2 --output-sync=line test-npu-sim test-ms ARGS=

test-torch: $(READY)
	$(BIN)/python -m pytest $(ARGS)

# torch_npu, the unmodified package, over a simulated CANN (tests/npu_sim/README.md). Needs g++.
test-npu-sim: $(NPU_READY)
	$(NPU_VENV)/bin/python -m pytest tests/npu_sim $(ARGS)

# The main job's model in MindSpore, on CPU processes.
train-ms: $(MS_READY)
	$(MS_VENV)/bin/python examples/mindspore/train_gpt.py --api $(API) --processes $(NPROC) $(ARGS)

test-ms: $(MS_READY)
	$(MS_VENV)/bin/python -m pytest tests/ms $(ARGS)

# Every test that docs/parity.md names must exist and pass.
parity: $(READY)
	$(BIN)/python -m tests.parity_table --run

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy hsdp_fn hsdp_fn_torch hsdp_fn_ms

# Both APIs, FSDP2 and the no-communication floor, alternating, in one run.
bench: $(READY)
	$(BIN)/python benchmarks/step.py $(ARGS)

clean:
	rm -rf $(VENV) $(NPU_VENV) $(MS_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
