"""A state of tensors of many dtypes, shapes and placements, compared as bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.common.np_dtype import bfloat16

import hsdp_fn as hsdp
import hsdp_fn_ms as hm
from hsdp_fn import HSDPState, ParamSpec
from tests.ms.torch_checkpoint import ODD, TIED, odd_bits
from tests.ms.workers import mesh_of


def raw(tensor: Tensor) -> np.ndarray:
    """A tensor's bits."""
    values = np.ascontiguousarray(tensor.asnumpy()).reshape(tuple(tensor.shape))
    return values.view(f"u{values.itemsize}").copy()


def typed(bits: np.ndarray, dtype: str) -> Tensor:
    return Tensor(bits.view(bfloat16 if dtype == "bfloat16" else np.dtype(dtype)))


def odd_state(kind: str, world: int, seed: int, **changes: tuple[Any, ...] | None) -> HSDPState:
    """The odd tensors, sharded; ``changes`` by name with ``_`` for the dot, None to leave one out."""
    table = {**ODD, **{name.replace("_", ".", 1): row for name, row in changes.items()}}
    table = {name: row for name, row in table.items() if row is not None}
    placements = {name: hsdp.Replicate() if row[2] is None else hsdp.Shard(row[2]) for name, row in table.items()}
    specs = [
        ParamSpec(name, shape, dtype, trainable, (TIED[name],) if name in TIED else ())
        for name, (shape, dtype, _, trainable) in table.items()
    ]
    mesh = mesh_of(kind, world)
    layout = hsdp.plan_layout(specs, hm.mesh_spec(mesh), placement_fn=lambda spec: placements[spec.name])
    bits = odd_bits(seed)
    values = {
        s.name: typed(bits[s.name], s.dtype)
        if ODD.get(s.name, ())[:2] == (s.shape, s.dtype)
        else Tensor(np.zeros(s.shape, np.float32)).astype(getattr(ms, s.dtype))
        for s in specs
    }
    return hsdp.shard(values, layout, backend=hm.MSBackend(mesh))


def require_bits(state: HSDPState, bits: Mapping[str, np.ndarray]) -> None:
    """This rank's rows are those of the whole tensors, to the bit."""
    rows, seen = hsdp.masters(state), 0
    for plan in state.layout.units:
        for bucket in plan.buckets:
            for member in bucket.params.members:
                start, stop = member.rows(bucket.mesh.shard_index(state.backend.rank))
                expected = np.take(bits[member.spec.name], range(start, stop), member.dim)
                np.testing.assert_array_equal(raw(rows[member.spec.name]), expected, err_msg=member.spec.name)
                seen += 1
    assert seen == len(bits)
