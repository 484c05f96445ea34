"""The core's `Backend` protocol over ``torch.distributed``: gloo on CPU, NCCL on CUDA, HCCL on Ascend.

Collectives are issued asynchronously from the current stream and awaited by their work handle, which orders the current
stream (on a device) or the host (on CPU) after them. Every buffer is allocated and freed on the current stream and is
kept alive by the state until the wait, so no user stream, event or ``record_stream`` is needed, as long as a state is
used on one stream. With the CPU offload policy, copies between host and device are recorded by events, which `settle`
awaits before the host reads a gradient or anybody writes a master.

They are called as attributes of ``torch.distributed``, so that profilers, CommDebugMode and wrappers see them. The
reduction is always SUM; scaling is done here (gloo and HCCL have no usable PREMUL_SUM, HCCL no AVG of its own).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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
from . import npu
from .mesh import mesh_spec, process_group, remember
from .pool import BufferPool

if TYPE_CHECKING:
    from .comm import UnitComm

_TORCH_DTYPE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}
_NAME: dict[torch.dtype, str] = {dtype: name for name, dtype in _TORCH_DTYPE.items()}
#: What a communication backend reduces, where that isn't everything: refused here instead of deep in a step.
_REDUCED: dict[str, frozenset[str]] = {"hccl": npu.REDUCED}

# The names that this torch doesn't warn about.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class TorchBackend:
    """One rank's collectives and copies.

    Args:
        mesh: whose process groups exist; its data-parallel axes as in `mesh_spec`. Layouts may have buckets on other
            meshes too: groups are looked up by their ranks.
        dp_mesh_dims: the data-parallel axes of a larger mesh.
        spec: what `mesh_spec` has made of the two, if it is known.
        offload_policy: where masters and gradients are kept; must equal the layout's.

    Raises:
        MeshError: this process isn't in the mesh.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        dp_mesh_dims: DataParallelMeshDims | None = None,
        spec: MeshSpec | None = None,
        offload_policy: OffloadPolicy | None = None,
    ) -> None:
        if mesh.get_coordinate() is None:
            raise MeshError(f"this process (rank {dist.get_rank()}) isn't in the mesh {mesh}")
        self.rank = dist.get_rank()
        self.device = _device_of(mesh)
        self.offload = offload_policy or OffloadPolicy()
        self.spec = spec or mesh_spec(mesh, dp_mesh_dims)
        remember(mesh)
        own = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        self._own = {tuple(dist.get_process_group_ranks(group)): group for group in own}
        self._groups: dict[tuple[MeshSpec, tuple[str, ...]], dist.ProcessGroup] = {}
        self._separate: dict[MeshSpec, dist.ProcessGroup] = {}  # of reduce-scatters; see `UnitComm`
        self._plans: dict[Flat, flats.FlatPlan] = {}
        self._meshes: dict[MeshSpec, DeviceMesh] = {}
        self.home, self._pin = self.device, False  # where shards are kept
        if isinstance(self.offload, CPUOffloadPolicy) and self.device.type != "cpu":
            self.home, self._pin = torch.device("cpu"), self.offload.pin_memory
        self.pool = BufferPool(self.device)  # large buffers, reused while a frame runs
        self._limit: list[timedelta | None] = [None]  # how long to wait for a collective; shared with units' backends
        self._copies: list[torch.Event] = []  # between host and device, not known to have ended
        self._kind = _kind_of(own[0], self.device)
        self.name = f"torch {self._kind} on {self.device}"

    def group(self, mesh: MeshSpec, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The process group of this rank along axes of a mesh, flattened: of the backend's own mesh if it has one of
        these ranks, else one for all backends; see `process_group`."""
        group = self._groups.get((mesh, axes))
        if group is None:
            ranks = mesh.group(self.rank, axes)
            group = self._own.get(ranks) or process_group(self.device.type, ranks)
            self._groups[mesh, axes] = group
        return group

    def shard_mesh(self, mesh: MeshSpec) -> DeviceMesh:
        """The shard group of this rank as a mesh of one axis."""
        found = self._meshes.get(mesh)
        if found is None:
            group = self.group(mesh, mesh.shard)
            found = self._meshes[mesh] = DeviceMesh.from_group(group, self.device.type, mesh_dim_names=("shard",))
        return found

    def for_unit(self, comm: UnitComm | None) -> TorchBackend:
        """The backend of a unit that communicates as ``comm`` says; this very one while that says nothing special, so
        ask again after changes. Cheap; does not communicate."""
        if comm is None or comm.is_default:
            return self
        from .comm import UnitBackend

        return UnitBackend(self, comm)

    def share_pool(self, pool: BufferPool) -> None:
        """Take buffers from another backend's pool, from the next frame on.

        Raises:
            BackendError: the pool is on another device.
        """
        if pool.device != self.device:
            raise BackendError(f"can't share buffers on {pool.device} with a backend on {self.device}")
        self.pool = pool

    def check(self, layout: Layout) -> None:
        """See `Backend.check`."""
        world = dist.get_world_size()
        if max(layout.mesh.ranks) >= world or self.rank not in layout.mesh.ranks:
            raise MeshError(
                f"the layout is for ranks {layout.mesh.ranks}, but this is rank {self.rank} of a world of {world}; "
                f"plan again for this world"
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
                if self.rank not in b.mesh.ranks:
                    names = [m.spec.name for m in b.params.members]
                    raise MeshError(f"parameters {names} are on ranks {b.mesh.ranks}, without this rank {self.rank}")
                if list(group := b.mesh.group(self.rank, b.mesh.shard)) != sorted(group):
                    names = [m.spec.name for m in b.params.members]
                    raise MeshError(
                        f"parameters {names} are sharded over ranks {group} in this order; process groups sort their "
                        f"ranks, so they must rise along the shard axes of a mesh"
                    )
                if b.grads is not None and b.reduce_dtype not in _REDUCED.get(self._kind, (b.reduce_dtype,)):
                    names = [m.spec.name for m in b.grads.members]
                    raise BackendError(
                        f"{self._kind} can't reduce {b.reduce_dtype} gradients, asked for by {names}; give a "
                        f"reduce_dtype that it can (float32)"
                    )

    def exchange(self, message: str) -> dict[int, str]:
        """See `Backend.exchange`."""
        known, mesh = {self.rank: message}, self.spec
        for axes in (mesh.shard, mesh.replicate):  # along one, then along the other: no group of all ranks is needed
            if axes and len(mesh.group(self.rank, axes)) > 1:
                group = self.group(mesh, axes)
                answers: list[dict[int, str]] = [{}] * dist.get_world_size(group)
                dist.all_gather_object(answers, known, group=group)
                known = {rank: text for answer in answers for rank, text in answer.items()}
        return dict(sorted(known.items()))

    def votes(self, mine: bool) -> int:
        """See `Backend.votes`."""
        count = torch.tensor([int(mine)], dtype=torch.int32, device=self.device)
        for axes in (self.spec.shard, self.spec.replicate):
            if axes and len(self.spec.group(self.rank, axes)) > 1:
                self._await(dist.all_reduce(count, group=self.group(self.spec, axes), async_op=True))
        return int(count.item())

    def prepare(self, layout: Layout) -> None:
        """See `Backend.prepare`."""
        for unit in layout.units:
            for bucket in unit.buckets:
                for mesh in (bucket.mesh, *((bucket.regather.mesh,) if bucket.regather else ())):
                    for axes in (mesh.shard, mesh.replicate):
                        if axes:
                            self.group(mesh, axes)

    def storage(self, tensor: Tensor) -> int:
        """See `Backend.storage`."""
        return tensor.untyped_storage().data_ptr()

    def objection(self, param: Tensor) -> str | None:
        """See `Backend.objection`."""
        if hasattr(param, "placements"):
            return "is a DTensor; give the parameters before they are sharded"
        if param.is_meta:
            return "is on the meta device; materialize it first"
        if param.layout is not torch.strided:
            return f"has layout {param.layout}; only dense tensors can be sharded"
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
        return tensor.numel() * tensor.element_size()

    def local_shape(self, mesh: MeshSpec, member: Member) -> tuple[int, ...]:
        """See `Backend.local_shape`."""
        return member.local_shape(mesh.shard_index(self.rank))

    @contextmanager
    def limited(self, seconds: float | None) -> Iterator[None]:
        """Inside, waiting for one collective takes at most so long (None: as the process group says). On a device the
        host then waits for each collective."""
        before, self._limit[0] = self._limit[0], None if seconds is None else timedelta(seconds=seconds)
        try:
            yield
        finally:
            self._limit[0] = before

    def zeros(self, numel: int, dtype: str) -> Tensor:
        """See `Backend.zeros`."""
        return torch.zeros(numel, dtype=_TORCH_DTYPE[dtype], device=self.device)

    def shard_params(self, mesh: MeshSpec, flat: Flat, params: Sequence[Tensor]) -> Tensor:
        """See `Backend.shard_params`."""
        dtype = params[0].dtype
        shard = torch.zeros(flat.numel, dtype=dtype, device=self.home, pin_memory=self._pin)
        with torch.no_grad():
            flats.shard_of(self._plan(mesh, flat), params, shard)
        return shard

    def piece(self, mesh: MeshSpec, flat: Flat, full: Sequence[Tensor]) -> Tensor:
        """See `Backend.piece`."""
        shard = torch.zeros(flat.numel, dtype=full[0].dtype, device=self.device)
        with torch.no_grad():
            flats.shard_of(self._plan(mesh, flat), full, shard)
        return shard

    def split(self, mesh: MeshSpec, flat: Flat, shard: Tensor) -> tuple[Tensor, ...]:
        """See `Backend.split`."""
        return flats.split(self._plan(mesh, flat), shard)

    def join(self, mesh: MeshSpec, flat: Flat, shard: Tensor, rows: Sequence[Tensor | None]) -> Tensor:
        """See `Backend.join`."""
        with torch.no_grad():
            return flats.join(self._plan(mesh, flat), shard, rows, self.clone)

    def load(self, shard: Tensor, dtype: str) -> Tensor:
        """See `Backend.load`."""
        moved = shard.to(self.device, non_blocking=True)
        if moved is not shard:
            self._copying()
        return moved.to(_TORCH_DTYPE[dtype])

    def store(self, shard: Tensor, dtype: str, factor: float, *, donate: bool) -> Tensor:
        """See `Backend.store`."""
        wanted = _TORCH_DTYPE[dtype]
        if wanted.itemsize > shard.dtype.itemsize:  # scale in the wider of the two
            shard, donate = shard.to(wanted), True
        if factor != 1.0:
            shard = shard.mul_(factor) if donate else shard * factor
        shard = shard.to(wanted)
        if self.home == shard.device:
            return shard
        kept = torch.empty(shard.shape, dtype=shard.dtype, device=self.home, pin_memory=self._pin)
        kept.copy_(shard, non_blocking=True)
        self._copying()
        return kept

    def settle(self) -> None:
        """See `Backend.settle`."""
        self._land()

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """See `Backend.cast`."""
        return tensor.to(_TORCH_DTYPE[dtype])

    def add(self, a: Tensor, b: Tensor, dtype: str) -> Tensor:
        """See `Backend.add`."""
        wanted = _TORCH_DTYPE[dtype]
        if a.device != self.device or b.device != self.device:
            self._land()
        return torch.add(a.to(wanted), b.to(a.device, wanted))

    def clone(self, tensor: Tensor) -> Tensor:
        """See `Backend.clone`."""
        self._land()
        pinned = self._pin and tensor.device.type == "cpu"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, pin_memory=pinned)
        return copy.copy_(tensor.detach())

    def pack(
        self,
        mesh: MeshSpec,
        flat: Flat,
        grads: Sequence[Tensor | None],
        dtype: str,
        factor: float,
    ) -> Tensor:
        """See `Backend.pack`."""
        wanted = _TORCH_DTYPE[dtype]
        packed = self.send_buffer(mesh, flat, wanted)
        if factor != 1.0 and any(g is not None and g.dtype.itemsize > wanted.itemsize for g in grads):
            grads, factor = [None if g is None else g * factor for g in grads], 1.0  # before a cast that may overflow
        flats.pack(self._plan(mesh, flat), grads, packed)
        return packed.mul_(factor) if factor != 1.0 else packed

    def send_buffer(self, mesh: MeshSpec, flat: Flat, dtype: torch.dtype) -> Tensor:
        """Memory for packed gradients, 1-D, which a reduce-scatter sends."""
        return self.pool.take(flat.numel * flat.shard_size, dtype)

    def unpack(self, mesh: MeshSpec, flat: Flat, gathered: Tensor) -> tuple[Tensor, ...]:
        """See `Backend.unpack`."""
        return flats.unpack(self._plan(mesh, flat), gathered, self.pool.take)

    def all_gather(self, mesh: MeshSpec, shard: Tensor) -> tuple[Tensor, dist.Work]:
        """See `Backend.all_gather`."""
        out = self.pool.take(shard.numel() * mesh.shard_size, shard.dtype)
        to, source = (out.view(torch.uint8), shard.view(torch.uint8)) if shard.dtype.itemsize == 1 else (out, shard)
        return out, getattr(dist, _ALL_GATHER)(to, source, group=self.group(mesh, mesh.shard), async_op=True)

    def reduce_scatter(self, mesh: MeshSpec, packed: Tensor) -> tuple[Tensor, dist.Work]:
        """See `Backend.reduce_scatter`."""
        out = torch.empty(packed.numel() // mesh.shard_size, dtype=packed.dtype, device=packed.device)
        return out, getattr(dist, _REDUCE_SCATTER)(out, packed, group=self.group(mesh, mesh.shard), async_op=True)

    def all_reduce(self, mesh: MeshSpec, buffer: Tensor) -> tuple[Tensor, dist.Work]:
        """See `Backend.all_reduce`."""
        return buffer, dist.all_reduce(buffer, group=self.group(mesh, mesh.replicate), async_op=True)

    def wait(self, handle: dist.Work | None) -> None:
        """See `Backend.wait`."""
        if handle is not None:
            self._await(handle)

    def _await(self, handle: dist.Work) -> None:
        limit = self._limit[0]
        try:
            if limit is not None and self.device.type != "cpu" and hasattr(handle, "is_completed"):
                _poll(handle, limit)  # there `Work.wait` returns at once, whatever its timeout
                limit = None
            handle.wait() if limit is None else handle.wait(limit)
        except Exception as error:
            error._hsdp_collective = True  # type: ignore[attr-defined]  # `recoverable` asks for it
            raise

    def _copying(self) -> None:
        """Note a copy between host and device, so that `settle` waits for it before the host touches either end."""
        event = torch.Event(self.device)
        event.record()
        self._copies.append(event)

    def _land(self) -> None:
        if self._copies:
            copies = self._copies[:]
            self._copies.clear()  # the list is shared with the units' backends
            for event in copies:
                event.synchronize()

    def _plan(self, mesh: MeshSpec, flat: Flat) -> flats.FlatPlan:
        plan = self._plans.get(flat)
        if plan is None:
            plan = self._plans[flat] = flats.FlatPlan.of(flat, mesh.shard_index(self.rank))
        return plan


def torch_backend(state: HSDPState) -> TorchBackend:
    """The state's backend.

    Raises:
        BackendError: it isn't this one.
    """
    if not isinstance(state.backend, TorchBackend):
        raise BackendError(f"a state of the {state.backend.name} backend can't run torch tensors")
    return state.backend


def _poll(handle: dist.Work, limit: timedelta) -> None:
    """Block until a device's collective has ended.

    Raises:
        TimeoutError: it takes longer.
    """
    deadline = time.monotonic() + limit.total_seconds()
    while not handle.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a collective took longer than {limit.total_seconds()} s; a peer may be gone")
        time.sleep(0.0002)


def _kind_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """What a group communicates with on this device. It may have a backend for each: ``cpu:gloo,npu:hccl``."""
    kinds = dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).get_device_backend_map()
    return str(kinds[device.type]) if device.type in kinds else dist.get_backend(group)


def _device_of(mesh: DeviceMesh) -> torch.device:
    """The device that this process computes on."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    if mesh.device_type == "npu":
        npu.require(f"the mesh {mesh}")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
