"""A numpy backend that is all ranks at once: the meaning of every collective in a line of numpy.

Tensors have a leading axis of ranks; collectives are reshapes and sums along it. One state stands for the whole world,
so thousands of programs run in a second without processes. A collective's output is NaN (or the smallest integer) until
it is awaited, so that a missing wait shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .backend import Tensor
from .dtypes import dtype_name
from .errors import BackendError, MeshError
from .layout import Flat, Layout, Member
from .mesh import MeshSpec

Array = npt.NDArray[Any]


class Flight:
    """A collective that has been issued: its output is poisoned until `land`."""

    def __init__(self, output: Array, value: Array) -> None:
        self.output, self.value = output, value
        if np.issubdtype(output.dtype, np.floating):
            output[...] = np.nan
        else:
            output[...] = False if output.dtype == bool else np.iinfo(output.dtype).min

    def land(self) -> None:
        self.output[...] = self.value


class ReferenceBackend:
    """The `Backend` protocol over numpy arrays of shape ``[ranks, ...]``. Has no bfloat16. Meshes of a layout must all
    be over the same ranks, in any order and shape."""

    name = "reference"

    def __init__(self, mesh: MeshSpec) -> None:
        self.mesh = mesh

    def stack(self, value: Array) -> Array:
        """The same value on every rank: ``[ranks, *value.shape]``."""
        return np.repeat(np.asarray(value)[None], self.mesh.size, axis=0)

    def check(self, layout: Layout) -> None:
        for mesh in dict.fromkeys([layout.mesh, *(b.mesh for unit in layout.units for b in unit.buckets)]):
            if sorted(mesh.ranks) != sorted(self.mesh.ranks):
                raise MeshError(f"the layout is for ranks {mesh.ranks}, this backend for {self.mesh.ranks}")
        for unit in layout.units:
            for b in unit.buckets:
                if "bfloat16" in (b.dtype, b.compute_dtype, b.reduce_dtype) or b.dtype.startswith("float8"):
                    names = [m.spec.name for m in b.params.members]
                    raise BackendError(f"the reference backend has no bfloat16 or float8; asked for by {names}")

    def exchange(self, message: str) -> dict[int, str]:
        return dict.fromkeys(self.mesh.ranks, message)  # one program stands for all ranks

    def votes(self, mine: bool) -> int:
        return self.mesh.size if mine else 0

    def prepare(self, layout: Layout) -> None:
        pass

    def storage(self, tensor: Tensor) -> int:
        while tensor.base is not None:
            tensor = tensor.base
        return int(tensor.__array_interface__["data"][0])

    def objection(self, param: Tensor) -> str | None:
        return None

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape[1:])

    def dtype(self, tensor: Tensor) -> str:
        return dtype_name(tensor.dtype)

    def nbytes(self, tensor: Tensor) -> int:
        return int(tensor.nbytes) // self.mesh.size

    def local_shape(self, mesh: MeshSpec, member: Member) -> tuple[int, ...]:
        return member.stored_shape  # padding included: ranks of one array have one shape

    def zeros(self, numel: int, dtype: str) -> Tensor:
        return np.zeros((self.mesh.size, numel), dtype)

    def shard_params(self, mesh: MeshSpec, flat: Flat, params: Sequence[Tensor]) -> Tensor:
        out = np.zeros((mesh.size, flat.numel), params[0].dtype)
        for member, param in zip(flat.members, params, strict=True):
            stored = self._stored(out, member)
            for i, rank in enumerate(self.mesh.ranks):
                start, stop = member.rows(mesh.shard_index(rank))
                rows = np.moveaxis(param[i], member.dim, 0)[start:stop]
                np.moveaxis(stored[i], member.dim, 0)[: stop - start] = rows
        return out

    def piece(self, mesh: MeshSpec, flat: Flat, full: Sequence[Tensor]) -> Tensor:
        return self.shard_params(mesh, flat, full)

    def split(self, mesh: MeshSpec, flat: Flat, shard: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._stored(shard, member) for member in flat.members)

    def join(self, mesh: MeshSpec, flat: Flat, shard: Tensor, rows: Sequence[Tensor | None]) -> Tensor:
        out = shard.copy()
        for member, new in zip(flat.members, rows, strict=True):
            stored = self._stored(out, member)
            if new is not None:
                stored[...] = new
            for i, rank in enumerate(self.mesh.ranks):
                start, stop = member.rows(mesh.shard_index(rank))
                np.moveaxis(stored[i], member.dim, 0)[stop - start :] = 0
        return out

    def load(self, shard: Tensor, dtype: str) -> Tensor:
        return self.cast(shard, dtype)

    def store(self, shard: Tensor, dtype: str, factor: float, *, donate: bool) -> Tensor:
        wide = np.promote_types(shard.dtype, dtype)  # scale in the wider of the two
        return (shard.astype(wide) * wide.type(factor)).astype(dtype) if factor != 1.0 else self.cast(shard, dtype)

    def settle(self) -> None:
        pass

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        return tensor.astype(dtype, copy=False)

    def add(self, a: Tensor, b: Tensor, dtype: str) -> Tensor:
        return a.astype(dtype, copy=False) + b.astype(dtype, copy=False)

    def clone(self, tensor: Tensor) -> Tensor:
        return tensor.copy()

    def pack(self, mesh: MeshSpec, flat: Flat, grads: Sequence[Tensor | None], dtype: str, factor: float) -> Tensor:
        out = np.zeros((self.mesh.size, flat.shard_size, flat.numel), dtype)
        for member, grad in zip(flat.members, grads, strict=True):
            if grad is None:
                continue
            for s in range(flat.shard_size):
                start, stop = member.rows(s)
                stored = self._stored(out[:, s], member)
                rows = np.moveaxis(grad, member.dim + 1, 1)[:, start:stop]
                np.moveaxis(stored, member.dim + 1, 1)[:, : stop - start] = rows * grad.dtype.type(factor)
        return out.reshape(self.mesh.size, -1)

    def unpack(self, mesh: MeshSpec, flat: Flat, gathered: Tensor) -> tuple[Tensor, ...]:
        pieces = gathered.reshape(self.mesh.size, flat.shard_size, flat.numel)
        out = []
        for member in flat.members:
            stored = [self._stored(pieces[:, s], member) for s in range(flat.shard_size)]
            whole = np.concatenate(stored, axis=member.dim + 1)
            out.append(
                np.moveaxis(np.moveaxis(whole, member.dim + 1, 0)[: member.spec.shape[member.dim]], 0, member.dim + 1)
            )
        return tuple(np.ascontiguousarray(t) for t in out)

    def all_gather(self, mesh: MeshSpec, shard: Tensor) -> tuple[Tensor, Flight]:
        value = np.stack([shard[self._places(mesh, rank, mesh.shard)].reshape(-1) for rank in self.mesh.ranks])
        return self._launch(value)

    def reduce_scatter(self, mesh: MeshSpec, packed: Tensor) -> tuple[Tensor, Flight]:
        chunks = packed.reshape(mesh.size, mesh.shard_size, -1)
        value = np.stack(
            [
                chunks[self._places(mesh, r, mesh.shard), mesh.shard_index(r)].sum(0, dtype=packed.dtype)
                for r in self.mesh.ranks
            ]
        )
        return self._launch(value)

    def all_reduce(self, mesh: MeshSpec, buffer: Tensor) -> tuple[Tensor, Flight]:
        value = np.stack(
            [buffer[self._places(mesh, r, mesh.replicate)].sum(0, dtype=buffer.dtype) for r in self.mesh.ranks]
        )
        return self._launch(value)

    def wait(self, handle: Flight | None) -> None:
        if handle is not None:
            handle.land()

    def _launch(self, value: Array) -> tuple[Array, Flight]:
        output = np.empty_like(value)
        return output, Flight(output, value)

    def _places(self, mesh: MeshSpec, rank: int, axes: tuple[str, ...]) -> list[int]:
        return [self.mesh.ranks.index(r) for r in mesh.group(rank, axes)]

    @staticmethod
    def _stored(flats: Array, member: Member) -> Array:
        """View of a member in stacked flat shards: ``[ranks, *stored_shape]``."""
        return flats[:, member.offset : member.offset + member.numel].reshape(len(flats), *member.stored_shape)
