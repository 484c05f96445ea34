# `make train` and `make test` set everything up on a fresh machine and reuse it the next time.
VENV    ?= .venv
PYTHON  ?= python3
NPROC   ?= 2
API     ?= functional
NAME    ?= cp_fsdp
ARGS    ?=
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1
export TORCH_DEVICE_BACKEND_AUTOLOAD = 0

.PHONY: train example test parity lint types bench setup clean

setup: $(READY)

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
	  { echo "the pinned requirements are for Python 3.11 and 3.12; name one: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY)

# The main job: a byte-level transformer on the Python standard library's sources. ARGS="--help" lists its options.
# API=facade runs the same training with fully_shard.
train: $(READY)
	$(BIN)/python -m torch.distributed.run --standalone --nproc_per_node=$(NPROC) \
	  examples/torch/train_gpt.py --api $(API) $(ARGS)

# NAME is tp_fsdp, cp_fsdp or moe_ep_fsdp: sharding together with another parallelism, on four CPU processes.
example: $(READY)
	$(BIN)/python -m torch.distributed.run --standalone --nproc_per_node=4 examples/torch/$(NAME).py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

# Every test that docs/parity.md names must exist and pass.
parity: $(READY)
	$(BIN)/python -m tests.parity_table --run

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy hsdp_fn hsdp_fn_torch

# Both APIs, FSDP2 and the no-communication floor, alternating, in one run.
bench: $(READY)
	$(BIN)/python benchmarks/step.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
