"""The core's `Backend` protocol over MindSpore: ``mccl`` on CPU, HCCL on Ascend.

Every method makes new tensors instead of writing into old ones, since MindSpore on CPU drops writes into views and
arithmetic in place. Reductions are sums; scaling is done here. Run with ``mccl`` on CPU; never on Ascend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mindspore as ms
import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor, mint, ops

from hsdp_fn import (
    BackendError,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    HSDPState,
    Layout,
    MeshError,
    MeshSpec,
    OffloadPolicy,
)
from hsdp_fn.dtypes import ITEMSIZE, dtype_name
from hsdp_fn.layout import Flat, Member

from . import flat as flats
from .collectives import Collectives, Compositions, Flight, TensorCollectives
from .launch import BACKENDS
from .mesh import DeviceMesh, mesh_spec, process_group
from .probe import facts, settle

_NAMES = tuple(name for name in ITEMSIZE if not name.startswith("float8"))
_MS_DTYPE = {name: getattr(ms, "bool_" if name == "bool" else name) for name in _NAMES}
_NAME = {dtype: name for name, dtype in _MS_DTYPE.items()}
#: What each communication backend gathers and sums. Of HCCL by its documentation.
_GATHERED = {
    "mccl": frozenset(_NAMES) - {"bool", "int16"},
    "hccl": frozenset(_NAMES) - {"bool"},
}
_REDUCED = {
    "mccl": frozenset({"float16", "bfloat16", "float32", "int8", "int16", "int32", "int64"}),
    "hccl": frozenset({"float16", "bfloat16", "float32", "int8", "int16", "int32", "int64"}),
}


class MSBackend:
    """One rank's collectives and copies.

    Args:
        mesh: whose process groups exist; its data-parallel axes as in `mesh_spec`. Layouts may have buckets on other
            meshes too: groups are looked up by their ranks.
        dp_mesh_dims: the data-parallel axes of a larger mesh.
        offload_policy: must equal the layout's. On CPU offloading changes nothing; elsewhere it is refused.

    Raises:
        MeshError: this process isn't in the mesh.
        BackendError: MindSpore can't be used here, see `probe.facts`; or offloading from a device.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        dp_mesh_dims: DataParallelMeshDims | None = None,
        offload_policy: OffloadPolicy | None = None,
    ) -> None:
        self.facts = facts()
        self.spec = mesh_spec(mesh, dp_mesh_dims)
        if mesh.get_coordinate() is None:
            raise MeshError(f"this process (rank {mesh.rank}) isn't in the mesh {mesh}")
        self.rank, self.world_size = mesh.rank, mesh.world_size
        self.offload = offload_policy or OffloadPolicy()
        if isinstance(self.offload, CPUOffloadPolicy) and self.facts.device != "CPU":
            raise BackendError(f"CPU offload from {self.facts.device} isn't written for MindSpore")
        self.kind = BACKENDS[self.facts.device]
        self._collectives: Collectives = Compositions() if self.kind == "mccl" else TensorCollectives()
        self._groups: dict[tuple[MeshSpec, tuple[str, ...]], str] = {}
        self._plans: dict[Flat, flats.FlatPlan] = {}
        self.name = f"mindspore {self.kind} on {self.facts.device}"

    def describe(self) -> str:
        """What it runs on and how it communicates, in a few lines."""
        return "\n".join(
            (
                f"{self.name}, rank {self.rank} of {self.world_size}, MindSpore {ms.__version__}",
                f"mesh {self.spec.names} of {self.spec.shape}: shard over {self.spec.shard}, replicate over "
                f"{self.spec.replicate}",
                f"collectives: {self._collectives.title}",
                f"arithmetic in place changes tensors: {self.facts.arithmetic_in_place}; writes to views arrive: "
                f"{self.facts.writes_to_views}",
            )
        )

    def group(self, mesh: MeshSpec, axes: tuple[str, ...]) -> str:
        """Name of the process group of this rank along axes of a mesh, flattened; see `process_group`."""
        found = self._groups.get((mesh, axes))
        if found is None:
            found = self._groups[mesh, axes] = process_group(mesh.group(self.rank, axes))
        return found

    def check(self, layout: Layout) -> None:
        """See `Backend.check`."""
        if max(layout.mesh.ranks) >= self.world_size or self.rank not in layout.mesh.ranks:
            raise MeshError(
                f"the layout is for ranks {layout.mesh.ranks}, but this is rank {self.rank} of a world of "
                f"{self.world_size}; plan again for this world"
            )
        if set(layout.mesh.ranks) != set(self.spec.ranks):
            raise MeshError(
                f"the layout is for ranks {sorted(layout.mesh.ranks)}, the backend's mesh for {sorted(self.spec.ranks)}"
            )
        if layout.offload != self.offload:
            raise BackendError(
                f"the layout has {layout.offload}, the backend {self.offload}; give both the same policy"
            )
        for unit in layout.units:
            for b in unit.buckets:
                names = [m.spec.name for m in b.params.members]
                if self.rank not in b.mesh.ranks:
                    raise MeshError(f"parameters {names} are on ranks {b.mesh.ranks}, without this rank {self.rank}")
                if list(group := b.mesh.group(self.rank, b.mesh.shard)) != sorted(group):
                    raise MeshError(
                        f"parameters {names} are sharded over ranks {group} in this order; process groups sort their "
                        f"ranks, so they must rise along the shard axes of a mesh"
                    )
                for dtype in (b.dtype, b.compute_dtype, b.reduce_dtype):
                    if dtype not in _MS_DTYPE:
                        raise BackendError(f"the MindSpore backend has no {dtype}; asked for by {names}")
                if b.gather is not None and b.compute_dtype not in _GATHERED[self.kind]:
                    raise BackendError(f"{self.kind} can't gather {b.compute_dtype} parameters, asked for by {names}")
                reduces = b.reduce_scatter is not None or b.all_reduce is not None
                if reduces and b.reduce_dtype not in _REDUCED[self.kind]:
                    raise BackendError(
                        f"{self.kind} can't reduce {b.reduce_dtype} gradients, asked for by {names}; give a "
                        f"reduce_dtype that it can (float32)"
                    )

    def exchange(self, message: str) -> dict[int, str]:
        """See `Backend.exchange`."""
        known, mesh = {self.rank: message}, self.spec
        for axes in (mesh.shard, mesh.replicate):  # along one, then along the other: no group of all ranks is needed
            if axes and (ranks := len(mesh.group(self.rank, axes))) > 1:
                answers: list[dict[int, str]] = [{} for _ in range(ranks)]
                dist.all_gather_object(answers, known, group=self.group(mesh, axes))
                known = {rank: text for answer in answers for rank, text in answer.items()}
        return dict(sorted(known.items()))

    def votes(self, mine: bool) -> int:
        """See `Backend.votes`."""
        axes = [along for along in (self.spec.shard, self.spec.replicate) if along]
        return int(self.sum_over(Tensor(np.array([int(mine)], np.int32)), axes).asnumpy()[0])

    def sum_over(self, value: Tensor, along: Sequence[tuple[str, ...]]) -> Tensor:
        """Communicates: the sum of a 1-D tensor over the ranks along axes of the backend's own mesh, one all-reduce for
        each of ``along`` that has more than one rank. May overwrite ``value``."""
        for axes in along:
            if len(self.spec.group(self.rank, axes)) > 1:
                value, flight = self._collectives.all_reduce(value, self.group(self.spec, axes))
                self.wait(flight)
        return value

    def prepare(self, layout: Layout) -> None:
        """See `Backend.prepare`."""
        for unit in layout.units:
            for bucket in unit.buckets:
                for mesh in (bucket.mesh, *((bucket.regather.mesh,) if bucket.regather else ())):
                    for axes in (mesh.shard, mesh.replicate):
                        if axes and len(mesh.group(self.rank, axes)) > 1:
                            self.group(mesh, axes)

    def storage(self, tensor: Tensor) -> int:
        """See `Backend.storage`."""
        return int(tensor.untyped_storage().data_ptr())

    def objection(self, param: Tensor) -> str | None:
        """See `Backend.objection`."""
        if not isinstance(param, Tensor):
            return f"is a {type(param).__name__}, no MindSpore tensor"
        if getattr(param, "has_init", False):
            return "hasn't been initialized; call init_data() on it first"
        if not param.is_contiguous():
            return f"isn't contiguous (strides {tuple(param.stride())}); call .contiguous() on it first"
        return None

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """See `Backend.shape`."""
        return tuple(tensor.shape)

    def dtype(self, tensor: Tensor) -> str:
        """See `Backend.dtype`."""
        return _NAME.get(tensor.dtype) or dtype_name(tensor.dtype)

    def nbytes(self, tensor: Tensor) -> int:
        """See `Backend.nbytes`."""
        return int(tensor.nbytes)

    def local_shape(self, mesh: MeshSpec, member: Member) -> tuple[int, ...]:
        """See `Backend.local_shape`."""
        return member.local_shape(mesh.shard_index(self.rank))

    @contextmanager
    def limited(self, seconds: float | None) -> Iterator[None]:
        """Inside, waiting for one collective takes at most so long. MindSpore's handles take no limit: ``mccl`` gives
        up after its own 30 seconds, HCCL as its environment says. So only None can be asked for.

        Raises:
            BackendError: a number of seconds.
        """
        if seconds is not None:
            raise BackendError(
                "MindSpore's collectives can't be given a time limit; use timeout=None (mccl gives up after 30 s, HCCL "
                "after HCCL_EXEC_TIMEOUT)"
            )
        yield

    def zeros(self, numel: int, dtype: str) -> Tensor:
        """See `Backend.zeros`."""
        return mint.zeros((numel,), dtype=_MS_DTYPE[dtype])

    def shard_params(self, mesh: MeshSpec, flat: Flat, params: Sequence[Tensor]) -> Tensor:
        """See `Backend.shard_params`."""
        return flats.shard_of(self._plan(mesh, flat), [Tensor(p) for p in params])

    def piece(self, mesh: MeshSpec, flat: Flat, full: Sequence[Tensor]) -> Tensor:
        """See `Backend.piece`."""
        return self.shard_params(mesh, flat, full)

    def split(self, mesh: MeshSpec, flat: Flat, shard: Tensor) -> tuple[Tensor, ...]:
        """See `Backend.split`. On CPU they can be read, not written."""
        return flats.split(self._plan(mesh, flat), shard)

    def join(self, mesh: MeshSpec, flat: Flat, shard: Tensor, rows: Sequence[Tensor | None]) -> Tensor:
        """See `Backend.join`."""
        plain = [None if row is None else Tensor(row) for row in rows]
        return flats.join(self._plan(mesh, flat), shard, plain)

    def load(self, shard: Tensor, dtype: str) -> Tensor:
        """See `Backend.load`."""
        return self.cast(shard, dtype)

    def store(self, shard: Tensor, dtype: str, factor: float, *, donate: bool) -> Tensor:
        """See `Backend.store`. Never writes into ``shard``."""
        if ITEMSIZE[dtype] > ITEMSIZE[self.dtype(shard)]:  # scale in the wider of the two
            shard = self.cast(shard, dtype)
        return self.cast(self._scaled(shard, factor), dtype)

    def settle(self) -> None:
        """See `Backend.settle`. Nothing is copied between host and device here."""

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """See `Backend.cast`."""
        wanted = _MS_DTYPE[dtype]
        return tensor if tensor.dtype == wanted else tensor.astype(wanted)

    def add(self, a: Tensor, b: Tensor, dtype: str) -> Tensor:
        """See `Backend.add`."""
        return ops.add(self.cast(a, dtype), self.cast(b, dtype))

    def clone(self, tensor: Tensor) -> Tensor:
        """See `Backend.clone`."""
        return Tensor(tensor).copy()

    def pack(self, mesh: MeshSpec, flat: Flat, grads: Sequence[Tensor | None], dtype: str, factor: float) -> Tensor:
        """See `Backend.pack`."""
        narrowing = any(g is not None and ITEMSIZE[self.dtype(g)] > ITEMSIZE[dtype] for g in grads)
        if factor != 1.0 and narrowing:  # before a cast that may overflow
            grads, factor = [None if g is None else self._scaled(g, factor) for g in grads], 1.0
        return self._scaled(flats.pack(self._plan(mesh, flat), grads, _MS_DTYPE[dtype]), factor)

    def unpack(self, mesh: MeshSpec, flat: Flat, gathered: Tensor) -> tuple[Tensor, ...]:
        """See `Backend.unpack`. On CPU every operator copies what it takes of a view, and saves the copy for backward;
        so there the parameters are made whole tensors at once, and can be freed."""
        return flats.unpack(self._plan(mesh, flat), gathered, copies=self.facts.device == "CPU")

    def all_gather(self, mesh: MeshSpec, shard: Tensor) -> tuple[Tensor, Flight]:
        """See `Backend.all_gather`."""
        return self._collectives.all_gather(shard, mesh.shard_size, self.group(mesh, mesh.shard))

    def reduce_scatter(self, mesh: MeshSpec, packed: Tensor) -> tuple[Tensor, Flight]:
        """See `Backend.reduce_scatter`."""
        index = mesh.shard_index(self.rank)
        return self._collectives.reduce_scatter(packed, mesh.shard_size, index, self.group(mesh, mesh.shard))

    def all_reduce(self, mesh: MeshSpec, buffer: Tensor) -> tuple[Tensor, Flight]:
        """See `Backend.all_reduce`. In place."""
        return self._collectives.all_reduce(buffer, self.group(mesh, mesh.replicate))

    def wait(self, handle: Flight | None) -> None:
        """See `Backend.wait`. On CPU the host waits too: errors of ``mccl`` come at a synchronization only."""
        if handle is not None:
            try:
                handle.wait()
            except Exception as error:
                error._hsdp_collective = True  # type: ignore[attr-defined]  # `recoverable` asks for it
                raise

    def catch_up(self) -> None:
        """On CPU, let all that was issued run: MindSpore raises an operator's error at a later one, which may belong to
        the next step. On a device the host doesn't wait."""
        if self.facts.device == "CPU":
            settle()

    def _scaled(self, tensor: Tensor, factor: float) -> Tensor:
        if factor == 1.0:
            return tensor
        if tensor.dtype == ms.float64:  # a Python number would be rounded to float32
            return tensor * Tensor(factor, ms.float64)
        return tensor * factor

    def _plan(self, mesh: MeshSpec, flat: Flat) -> flats.FlatPlan:
        plan = self._plans.get(flat)
        if plan is None:
            plan = self._plans[flat] = flats.FlatPlan.of(flat, mesh.shard_index(self.rank))
        return plan


def ms_backend(state: HSDPState) -> MSBackend:
    """The state's backend.

    Raises:
        BackendError: it isn't this one.
    """
    if not isinstance(state.backend, MSBackend):
        raise BackendError(f"a state of the {state.backend.name} backend can't run MindSpore tensors")
    return state.backend
