"""What the tests of the MindSpore side share: arrays, meshes, small cells, oracles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import hsdp_fn_ms as hm
from hsdp_fn import HSDPState, apply_updates, clone, full_params, grads, masters, unshard
from hsdp_fn_ms.backend import ms_backend
from hsdp_fn_ms.binding import parameter_places
from tests.ms.sizes import HIDDEN, OUT, WIDTH


def array(value: Tensor) -> np.ndarray:
    """A copy of a tensor's values (``asnumpy`` is a live view); bfloat16 as float32."""
    value = Tensor(value)
    return (value.astype(ms.float32) if value.dtype == ms.bfloat16 else value).asnumpy().copy()


def tensor(value: Any) -> Tensor:
    return Tensor(np.ascontiguousarray(value))


def mesh_of(kind: str, world: int) -> hm.DeviceMesh:
    """``shard``: FSDP. ``replicate``: one shard rank. ``both``: HSDP with two replicas."""
    if kind == "shard":
        return hm.init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    shape = (world, 1) if kind == "replicate" else (2, world // 2)
    return hm.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


# ------------------------------------------------------------------------------------------------------------- cells

LAYERS = ("layers.0", "layers.1", "layers.2")


class Block(nn.Cell):
    """Two dense layers, a norm and a residual, with sizes that neither 2 nor 4 ranks divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,), epsilon=1e-5)  # torch's
        self.up = nn.Dense(WIDTH, HIDDEN)
        self.down = nn.Dense(HIDDEN, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        return x + self.down(ops.relu(self.up(self.norm(x))))


class Plain(nn.Cell):
    """Without a norm, for integers and for float16."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(WIDTH, 5)
        self.down = nn.Dense(5, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        return x + self.down(ops.relu(self.up(x)))


class Chain(nn.Cell):
    """A root-owned first and last layer around three blocks."""

    def __init__(self, block: Callable[[], nn.Cell] = Block, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Dense(WIDTH, WIDTH)
        self.layers = nn.CellList([block() for _ in range(depth)])
        self.last = nn.Dense(WIDTH, OUT)

    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Tied(nn.Cell):
    """The last layer uses the first one's weight; one layer is frozen and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(WIDTH, WIDTH)
        self.layers = nn.CellList([Plain(), Plain(), Plain()])
        self.last = nn.Dense(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        for p in self.layers[1].get_parameters():
            p.requires_grad = False

    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers[:2]:
            x = layer(x)
        return self.last(x)


def fill(
    cell: nn.Cell, seed: int = 0, *, integers: bool = False, values: Mapping[str, np.ndarray] | None = None
) -> nn.Cell:
    """Set every parameter by path: to ``values``, or from a seed, the same on every rank and for every such cell."""
    places = {name: (owner, local) for name, owner, local in parameter_places(cell)}
    for name, value in (values or weights(cell, seed, integers=integers)).items():
        owner, local = places[name]
        owner._params[local].set_data(tensor(value))
    return cell


def weights(cell: nn.Cell, seed: int = 0, *, integers: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    out = {}
    for spec in hm.param_specs(cell):
        values = rng.integers(-1, 2, spec.shape) if integers else rng.normal(0, 0.4, spec.shape)
        out[spec.name] = values.astype(spec.dtype)
    return out


def batch(rank: int, step: int = 0, *, integers: bool = False, outputs: int = OUT) -> tuple[Tensor, Tensor]:
    """Inputs and targets, different on each rank and step."""
    rng = np.random.default_rng((rank, step, 7))
    draw = (lambda n: rng.integers(-1, 2, (4, n))) if integers else (lambda n: rng.normal(0, 1, (4, n)))
    return tensor(draw(WIDTH).astype(np.float32)), tensor(draw(outputs).astype(np.float32))


def squares(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).mean()


def linear(out: Tensor, y: Tensor) -> Tensor:
    """Gradients of integer-valued models are integers."""
    return (out * y.astype(out.dtype)).sum()


# ----------------------------------------------------------------------------------------------------------- oracles


class Single:
    """The same model trained by plain MindSpore in this process, on all ranks' batches."""

    def __init__(self, cell: nn.Cell, loss: Callable[..., Tensor] = squares) -> None:
        self.cell, self.loss = cell, loss
        self.params: dict[str, Parameter] = {}
        for name, owner, local in parameter_places(cell):
            if all(owner._params[local] is not p for p in self.params.values()):
                self.params[name] = owner._params[local]
        self.velocity: dict[str, np.ndarray] = {}

    def gradients(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, dict[str, np.ndarray]]:
        """Mean loss and its gradient by name."""
        trainable = [n for n, p in self.params.items() if p.requires_grad]

        def forward() -> Tensor:
            return sum(self.loss(self.cell(x), y) for x, y in batches) / len(batches)

        leaves = ms.ParameterTuple([self.params[n] for n in trainable])
        value, found = ms.value_and_grad(forward, None, weights=leaves)()
        return float(array(value)), dict(zip(trainable, map(array, found), strict=True))

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], lr: float = 0.1, momentum: float = 0.9) -> float:
        value, found = self.gradients(batches)
        for name, g in found.items():
            self.velocity[name] = momentum * self.velocity.get(name, 0 * g) + g
            self.params[name].set_data(tensor(array(self.params[name]) - lr * self.velocity[name].astype(g.dtype)))
        return value


def momentum_step(state: HSDPState, velocity: dict[str, Any], lr: float = 0.1, momentum: float = 0.9) -> HSDPState:
    """One optimizer step by hand, on the shards."""
    state, rows = grads(state)
    current, new = masters(state), {}
    for name, g in rows.items():
        if g is not None:
            velocity[name] = g if name not in velocity else velocity[name] * momentum + g
            new[name] = current[name] - velocity[name] * lr
    return apply_updates(state, new)


def full_values(state: HSDPState) -> dict[str, np.ndarray]:
    """Full parameters by name, of a state that stays usable. Communicates."""
    copy = unshard(clone(state))
    return {name: array(value) for name, value in full_params(copy).items()}


def local_rows(state: HSDPState, full: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """This rank's rows of full arrays, as ``torch.chunk`` hands them out."""
    backend, out = ms_backend(state), {}
    for plan in state.layout.units:
        for bucket in plan.buckets:
            for member in bucket.params.members:
                if member.spec.name in full:
                    n, parts = member.spec.shape[member.dim], bucket.mesh.shard_size
                    size, at = -(-n // parts), bucket.mesh.shard_index(backend.rank)
                    rows = range(min(at * size, n), min(at * size + size, n))
                    out[member.spec.name] = np.take(full[member.spec.name], rows, member.dim)
    return out


def close(found: Mapping[str, Any], expected: Mapping[str, np.ndarray], rtol: float = 1e-6) -> None:
    """Equal to ``rtol`` of the largest value."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, float(np.abs(value).max(initial=0.0)))
        np.testing.assert_allclose(found[name], value, rtol=0, atol=rtol * scale, err_msg=name)
