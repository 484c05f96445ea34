"""What the tests of the torch side share: a decorator that runs a test's body on gloo ranks, small models, oracles.

Models and data are integer-valued wherever a test doesn't need otherwise, so that sums are exact in every order and
results are compared for equality.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hsdp_fn_torch as ht
from hsdp_fn import Collective, HSDPState, ParamSpec, Replicate, Shard, apply_updates, grads, masters

WIDTH = 6
LAYERS = ("layers.0", "layers.1", "layers.2")


def on_ranks(*worlds: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a pytest test whose body runs as ``body(rank, world, ...)`` on every rank of gloo groups of these sizes.

    Further parameters of the body become the test's own, for `pytest.mark.parametrize` (picklable values only).

    Example:
        @on_ranks(2)
        def test_ranks_agree_on_the_world(rank, world):
            assert world == 2
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(body).parameters)[2:]

        def test(gloo: Any, **given: Any) -> None:
            for world in worlds:
                gloo.run(body, *[given[name] for name in names], world=world, **options)

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("gloo", *names)]
        test.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
        # The workers look the body up by name, and the test's own name is the wrapper's.
        body.__qualname__ = f"body_of_{body.__name__}"
        body.__globals__[body.__qualname__] = body
        return test

    return decorate


# ------------------------------------------------------------------------------------------------------------ models


class Chain(nn.Module):
    """A root-owned first and last layer around three blocks, with sizes that neither 2 nor 4 ranks divide evenly."""

    def __init__(self, block: Callable[[], nn.Module] | None = None, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList((block or Block)() for _ in range(depth))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Block(nn.Module):
    """Two linear layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Checkpointed(Block):
    """A block that recomputes its activations."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


def integers_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Set every parameter to integers in -1 .. 1, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-1, 2, p.shape, generator=generator))
    return model


def batch(rank: int, step: int = 0, width: int = WIDTH, outputs: int = 3) -> tuple[Tensor, Tensor]:
    """Integer inputs and weights of the outputs, different on each rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    draw = [torch.randint(-2, 3, (4, n), generator=generator).float() for n in (width, outputs)]
    return draw[0], draw[1]


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Linear in the output, so that gradients of integer-valued models are integers."""
    return (out * y).sum()


def step_of(model: nn.Module, loss: Callable[..., Tensor] = loss_of) -> Callable[..., Any]:
    """``value_and_grad`` of the model's loss on a batch ``x, y``."""
    return ht.value_and_grad(lambda p, x, y: loss(ht.functional_call(model, p, x), y))


# ------------------------------------------------------------------------------------------------------------ meshes


def fsdp_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))


def hsdp_mesh(replicate: int = 2, shard: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def mesh_for(world: int) -> DeviceMesh:
    """FSDP on 2 ranks, HSDP 2 x 2 on 4."""
    return hsdp_mesh() if world == 4 else fsdp_mesh(world)


def norm_like(spec: ParamSpec) -> Replicate | Shard | None:
    """A placement function: biases replicated, matrices split on dim 1, the last layer as usual."""
    if spec.name.startswith("last"):
        return None
    return Replicate() if len(spec.shape) == 1 else Shard(1)


# ----------------------------------------------------------------------------------------------------------- oracles


def mean_grads(model: nn.Module, batches: Sequence[tuple[Any, ...]], loss: Callable[..., Tensor] = loss_of) -> dict:
    """Gradients by name of the mean loss over the batches, computed by plain torch in this process."""
    model.zero_grad(set_to_none=True)
    (sum((loss(model(*b[:-1]), b[-1]) for b in batches), torch.zeros(())) / len(batches)).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    return found


def local_rows(state: HSDPState, full: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """This rank's rows of full tensors by ``torch.chunk``, without the library's copies."""
    out: dict[str, Tensor | None] = {}
    for plan in state.layout.units:
        for bucket in plan.buckets:
            index, ranks = bucket.mesh.shard_index(dist.get_rank()), bucket.mesh.shard_size
            for member in bucket.params.members:
                if member.spec.name in full:
                    tensor = full[member.spec.name]
                    out[member.spec.name] = None if tensor is None else chunk(tensor, ranks, member.dim)[index]
    return out


def chunk(tensor: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """``torch.chunk``, with the empty trailing pieces that it leaves out."""
    pieces = list(tensor.chunk(ranks, dim))
    return pieces + [tensor.narrow(dim, 0, 0)] * (ranks - len(pieces))


def equal(found: Any, expected: Any, what: str = "") -> None:
    """Same structure, dtypes, shapes and bits; None matches None only."""
    torch.testing.assert_close(
        _without_none(found), _without_none(expected), rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def close(found: Any, expected: Any, tolerance: float = 1e-6, what: str = "") -> None:
    """Same structure, dtypes and shapes, values to ``tolerance`` (relative and absolute)."""
    torch.testing.assert_close(
        _without_none(found), _without_none(expected), rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def _without_none(value: Any) -> Any:
    """Values as `torch.testing` can compare them: None as a tensor that equals no other, parameters as tensors."""
    if isinstance(value, Mapping):
        return {name: _without_none(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_none(v) for v in value]
    return torch.empty(0, 0, 0, 0, dtype=torch.bool) if value is None else value.detach()


def step_grads(step: Callable[..., Any], state: HSDPState, *args: Any, **kwargs: Any) -> tuple[Tensor, dict, HSDPState]:
    """One step and its gradients: ``(loss, rows by name, state)``."""
    (loss, _), state = step(state, *args, **kwargs)
    state, rows = grads(state)
    return loss, rows, state


def sgd(state: HSDPState, rows: Mapping[str, Tensor | None], rate: float) -> HSDPState:
    """Gradient descent as a pure function of the masters."""
    old = masters(state)
    return apply_updates(state, {n: old[n] - rate * g for n, g in rows.items() if g is not None})


def snapshot(state: HSDPState) -> tuple[Any, ...]:
    """Everything a state holds, copied: leaves with their structure, counters, ledger, and what tensors they are."""
    leaves, spec = optree.tree_flatten(state, namespace="hsdp_fn")
    return spec, [t.clone() for t in leaves], [t.data_ptr() for t in leaves], state.step, state.micro, state.ledger


def assert_untouched(state: HSDPState, before: tuple[Any, ...], what: str = "") -> None:
    """The state is byte for byte what it was when `snapshot` was taken, and may still be used."""
    state.token.require("assert_untouched")
    after = snapshot(state)
    assert after[0] == before[0], f"{what}: structure {before[0]} -> {after[0]}"
    equal(after[1], before[1], what)
    assert after[2:] == before[2:], f"{what}: {before[2:]} -> {after[2:]}"


def model_parts(model: nn.Module) -> dict[str, Any]:
    """What a frame must put back: the very objects in the modules' tables, and what else stands in their dicts."""
    parts: dict[str, Any] = {}
    for name, module in model.named_modules():
        parts[name] = {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")}
        parts[name] |= {
            f"{table}.{k}": v for table in ("_parameters", "_buffers") for k, v in getattr(module, table).items()
        }
    return parts


def assert_same_parts(model: nn.Module, before: dict[str, Any], what: str = "") -> None:
    """The model's modules hold the same objects as when `model_parts` looked."""
    after = model_parts(model)
    assert after.keys() == before.keys(), what
    for name, parts in before.items():
        assert after[name].keys() == parts.keys(), f"{what}: {name!r} has {after[name].keys() ^ parts.keys()}"
        changed = [key for key, value in parts.items() if after[name][key] is not value]
        assert not changed, f"{what}: {name!r} has other {changed}"


# ----------------------------------------------------------------------------------------------------- what was sent


C10D_NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


class Traffic(TorchDispatchMode):
    """Records the collectives that c10d is asked for while the mode is on: ``(op, dtype, elements of the larger)``."""

    def __init__(self, namespace: str = "c10d") -> None:
        super().__init__()
        self.namespace = namespace
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == self.namespace and name != "wait_tensor":
            out = func(*args, **(kwargs or {}))
            largest = max((t for t in optree.tree_leaves((args, out)) if isinstance(t, Tensor)), key=Tensor.numel)
            self.seen.append((C10D_NAMES.get(name, name), str(largest.dtype).split(".")[1], largest.numel()))
            return out
        return func(*args, **(kwargs or {}))

    @staticmethod
    def of(ledger: Sequence[Collective]) -> list[tuple[str, str, int]]:
        """A ledger in the same terms."""
        return [(c.op, c.dtype, c.numel) for c in ledger]


def counts(ledger: Sequence[Collective]) -> dict[str, int]:
    """How many collectives of each kind."""
    ops = [c.op for c in ledger]
    return {op: ops.count(op) for op in sorted(set(ops))}


def assert_trains_like_one_process(
    model: nn.Module, rank: int, world: int, units: Sequence[Any] = LAYERS, **policies: Any
) -> dict[str, int]:
    """One step on integers: loss and gradients exactly those of one process. Returns the ledger's counts."""
    integers_(model)
    single = copy.deepcopy(model)
    state = ht.shard_module(model, mesh_for(world), units, **policies)
    parts = model_parts(model)
    value, rows, state = step_grads(step_of(model), state, *batch(rank))
    expected = mean_grads(single, [batch(r) for r in range(world)])
    equal(value, loss_of(single(batch(rank)[0]), batch(rank)[1]).detach())
    equal(rows, local_rows(state, expected))
    assert_same_parts(model, parts)
    return counts(state.ledger)
