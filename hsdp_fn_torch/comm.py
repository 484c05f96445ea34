"""A unit's own communication: custom collectives, their memory and groups, and the hook on its reduced gradients.

A `UnitComm` is the description that a user changes; `TorchBackend.for_unit` makes the backend that follows it. Objects
written for FSDP2's ``AllGather`` and ``ReduceScatter`` work here unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hsdp_fn import BackendError, Layout, MeshSpec
from hsdp_fn.arguments import require_bool
from hsdp_fn.layout import Flat

from . import flat as flats
from .backend import _ALL_GATHER, _REDUCE_SCATTER, _TORCH_DTYPE, TorchBackend
from .symm_mem import SymmMemAllGather, SymmMemReduceScatter, no_symm_mem

# ------------------------------------------------------------------------------------------------- what users implement


@runtime_checkable
class Comm(Protocol):
    """Where a collective's buffers come from."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized contiguous tensor of shape ``size`` (one number). Doesn't communicate.

        The memory of a reduce-scatter's output becomes the gradient's, so it must be new each time. The others may be
        buffers that the object uses again, as long as no collective on them is in flight: a frame has one
        reduce-scatter in flight, and as many all-gathers as it prefetches units, plus one.
        """
        ...


@runtime_checkable
class AllGather(Comm, Protocol):
    """An all-gather over a unit's shard group."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Communicates. Called by keyword, without autograd, with ``async_op=True``.

        Args:
            output_tensor: ``(ranks * n,)``, from `allocate`; the ranks' inputs, in the order of their ranks in group.
            input_tensor: ``(n,)`` of the same dtype. Read only: it can be the memory of the unit's masters.

        Returns:
            Something whose ``wait()`` orders the current stream (on CPU: the caller) after the collective, or None: it
            is done, or the current stream is ordered after it.
        """
        ...


@runtime_checkable
class ReduceScatter(Comm, Protocol):
    """A reduce-scatter over a unit's shard group."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Communicates. Called by keyword, without autograd, with ``async_op=True``.

        Args:
            output_tensor: ``(n,)``, from `allocate`, in the unit's reduce dtype.
            input_tensor: ``(ranks * n,)``, from `allocate`: one slice a rank. May be overwritten.
            op: always ``ReduceOp.SUM``. The mean is made afterwards, by one multiplication.

        Returns:
            See `AllGather`.
        """
        ...


class DefaultMemory:
    """Base of collectives that take the memory which the default ones take: reused within a step, and, for
    all-gathers, handed on as the full parameters where these lie in place. Parameters are copied out of the output of
    any other all-gather, as FSDP2 does, since its object may use the buffer again."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Comm.allocate`."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


# ------------------------------------------------------------------------------------------------ what is described


@dataclass(eq=False)
class UnitComm:
    """How one unit communicates. The defaults are the backend's own collectives.

    Change it by its methods, which check first and leave it unchanged when they raise. All ranks must make the same
    changes at the same place of the program.

    Attributes:
        all_gather, reduce_scatter: custom collectives; None for the default.
        all_reduce_hook: edits a finished gradient in place: a 1-D tensor, the unit's flat shard (a bucket), in the
            wider of reduce and gradient dtype, after all sums and divisions.
        all_reduce_hook_stream: on which the hook runs; None for the current one.
        separate_reduce_scatter_group: reduce-scatters have a process group of their own.
        allocate_from_group: buffers of default collectives come from the process group's allocator, if it has one.
        zero_copy: where layout and dtype allow it, the all-gather sends the masters' memory and its output becomes
            the full parameters. False copies at both ends.
    """

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    all_reduce_hook: Callable[[Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
    separate_reduce_scatter_group: bool = False
    allocate_from_group: bool = False
    zero_copy: bool = True

    @property
    def is_default(self) -> bool:
        """Whether there is nothing that the ordinary backend doesn't do."""
        return (
            self.all_gather is None
            and self.reduce_scatter is None
            and self.all_reduce_hook is None
            and not self.separate_reduce_scatter_group
            and not self.allocate_from_group
            and self.zero_copy
        )

    def set_all_gather(self, comm: AllGather | None) -> None:
        """Use a custom all-gather; None goes back to the default.

        Raises:
            TypeError: it can't be called or lacks ``allocate``.
        """
        _require_comm("all-gather", "AllGather", comm)
        self.all_gather = comm

    def set_reduce_scatter(self, comm: ReduceScatter | None) -> None:
        """Use a custom reduce-scatter; None goes back to the default.

        Raises:
            TypeError: it can't be called or lacks ``allocate``.
        """
        _require_comm("reduce-scatter", "ReduceScatter", comm)
        self.reduce_scatter = comm

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None] | None, *, stream: Any = None, replicates: bool = False
    ) -> None:
        """Call ``hook(flat_gradient)`` on each finished gradient before it is cast. None removes it.

        The hook may communicate: it runs where a reduction ends, which all ranks reach in the same order.

        Args:
            stream: on which to run it: ordered after the current stream, which is ordered after it.
            replicates: whether the unit's mesh has a replicate axis (HSDP).

        Raises:
            TypeError: the hook can't be called. ValueError: a stream on a mesh that replicates.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"the all-reduce hook must be callable or None, found {hook!r}")
        if stream is not None and replicates:
            raise ValueError("stream cannot be set when using native HSDP")
        if stream is not None and not hasattr(stream, "wait_stream"):
            raise TypeError(f"stream must be a torch stream or None, found {stream!r}")
        self.all_reduce_hook, self.all_reduce_hook_stream = hook, stream

    def set_separate_reduce_scatter_group(self, enable: bool = True) -> None:
        """Give reduce-scatters a process group of their own, so that they run beside all-gathers. Doesn't communicate:
        the group is made by `UnitBackend.prepare`, or before the first reduce-scatter, by its ranks together."""
        require_bool("enable", enable)
        self.separate_reduce_scatter_group = enable

    def set_allocate_from_group(self, enable: bool = True) -> None:
        """Allocate buffers by the process group's own allocator, where it has one (NCCL does, gloo doesn't).

        Raises:
            AssertionError: a custom collective was set, which allocates for itself.
        """
        require_bool("enable", enable)
        self._require_no_custom("set_allocate_memory_from_process_group")
        self.allocate_from_group = enable

    def set_zero_copy(self, enable: bool = True) -> None:
        """See the attribute."""
        require_bool("enable", enable)
        self.zero_copy = enable

    def set_symm_mem(self, group: dist.ProcessGroup, device: torch.device, backend: str = "NCCL") -> None:
        """Communicate through NCCL's symmetric memory. Communicates: a barrier over ``group``.

        Follows FSDP2's classes of the same names; never run so far, as no such device was at hand.

        Args:
            group: the unit's shard group.
            device: on which it computes.

        Raises:
            AssertionError: a custom collective, or allocation from the process group, was set.
            NotImplementedError: there is no symmetric memory here; the text says why.
        """
        self._require_no_custom("set_symm_mem", SymmMemAllGather, SymmMemReduceScatter)
        if self.allocate_from_group:
            raise AssertionError("cannot call set_symm_mem() when memory is allocated from the process group")
        if reason := no_symm_mem(group, device, backend):
            raise NotImplementedError(f"no symmetric memory for communication: {reason}")
        all_gather, reduce_scatter = SymmMemAllGather(group, backend), SymmMemReduceScatter(group, backend)
        self.all_gather, self.reduce_scatter = all_gather, reduce_scatter

    def _require_no_custom(self, method: str, *allowed: type) -> None:
        for what, comm in (("all gather", self.all_gather), ("reduce scatter", self.reduce_scatter)):
            if comm is not None and not isinstance(comm, allowed):
                raise AssertionError(f"cannot call {method}() when {what} comm is custom: {type(comm).__name__}")


# -------------------------------------------------------------------------------------------------- what follows it


class UnitBackend(TorchBackend):
    """The backend of one unit: all of ``base`` (its very groups, plans, buffers, copies), but for what ``comm`` says.

    ``comm`` is read at each collective, so its changes hold from the next one on.
    """

    def __init__(self, base: TorchBackend, comm: UnitComm) -> None:
        vars(self).update(vars(base))  # the very objects; made anew for each frame, as a pool may come to be shared
        self.base, self.comm = base, comm

    def for_unit(self, comm: UnitComm | None) -> TorchBackend:
        """See `TorchBackend.for_unit`."""
        return self.base.for_unit(comm)

    def prepare(self, layout: Layout) -> None:
        """See `Backend.prepare`. Makes the reduce-scatters' own groups too, if there are to be any."""
        super().prepare(layout)
        if self.comm.separate_reduce_scatter_group:
            for bucket in (b for unit in layout.units for b in unit.buckets if b.reduce_scatter is not None):
                self._reduce_group(bucket.mesh)

    def load(self, shard: Tensor, dtype: str) -> Tensor:
        """See `Backend.load`. Always a copy without ``zero_copy``."""
        source = super().load(shard, dtype)
        if source is not shard or self.comm.zero_copy:
            return source
        return self.pool.take(shard.numel(), shard.dtype).copy_(shard.detach())

    def store(self, shard: Tensor, dtype: str, factor: float, *, donate: bool) -> Tensor:
        """See `Backend.store`. Calls the hook on memory that nothing else holds."""
        hook = self.comm.all_reduce_hook
        if hook is None:
            return super().store(shard, dtype, factor, donate=donate)
        wanted = _TORCH_DTYPE[dtype]
        if wanted.itemsize > shard.dtype.itemsize:
            shard, donate = shard.to(wanted), True
        if not donate:
            shard = shard * factor if factor != 1.0 else shard.clone()
        elif factor != 1.0:
            shard.mul_(factor)
        self._run_hook(hook, shard)
        return super().store(shard, dtype, 1.0, donate=True)

    def send_buffer(self, mesh: MeshSpec, flat: Flat, dtype: torch.dtype) -> Tensor:
        """See `TorchBackend.send_buffer`. From where the reduce-scatter wants it."""
        numel = flat.numel * flat.shard_size
        if numel and mesh.shard_size > 1:
            if self.comm.reduce_scatter is not None:
                return self._buffer(self.comm.reduce_scatter, numel, dtype)
            if self.comm.allocate_from_group:
                return self._from_group(self._reduce_group(mesh), numel, dtype)
        return super().send_buffer(mesh, flat, dtype)

    def unpack(self, mesh: MeshSpec, flat: Flat, gathered: Tensor) -> tuple[Tensor, ...]:
        """See `Backend.unpack`. Copies where the all-gather's object keeps the memory, and without ``zero_copy``."""
        custom = self.comm.all_gather
        keeps = custom is not None and mesh.shard_size > 1 and not _takes_default_memory(custom)
        return flats.unpack(self._plan(mesh, flat), gathered, self.pool.take, copy=keeps or not self.comm.zero_copy)

    def all_gather(self, mesh: MeshSpec, shard: Tensor) -> tuple[Tensor, Any]:
        """See `Backend.all_gather`."""
        custom = self.comm.all_gather
        if custom is None and not self.comm.allocate_from_group:
            return super().all_gather(mesh, shard)
        group, numel = self.group(mesh, mesh.shard), shard.numel() * mesh.shard_size
        if custom is None:
            out = self._from_group(group, numel, shard.dtype)
            return out, getattr(dist, _ALL_GATHER)(out, shard, group=group, async_op=True)
        out = self._buffer(custom, numel, shard.dtype)
        with torch.no_grad():
            work = custom(output_tensor=out, input_tensor=shard, group=group, async_op=True)
        return out, _handle(custom, work)

    def reduce_scatter(self, mesh: MeshSpec, packed: Tensor) -> tuple[Tensor, Any]:
        """See `Backend.reduce_scatter`."""
        custom, group, numel = self.comm.reduce_scatter, self._reduce_group(mesh), packed.numel() // mesh.shard_size
        if custom is not None:
            out = self._buffer(custom, numel, packed.dtype, pooled=False)
            with torch.no_grad():
                work = custom(output_tensor=out, input_tensor=packed, group=group, op=dist.ReduceOp.SUM, async_op=True)
            return out, _handle(custom, work)
        if self.comm.allocate_from_group:
            out = self._from_group(group, numel, packed.dtype)
        else:
            out = torch.empty(numel, dtype=packed.dtype, device=packed.device)
        return out, getattr(dist, _REDUCE_SCATTER)(out, packed, group=group, async_op=True)

    def _reduce_group(self, mesh: MeshSpec) -> dist.ProcessGroup:
        """The reduce-scatter's group. Making one of its own communicates, among its ranks only."""
        if not self.comm.separate_reduce_scatter_group:
            return self.group(mesh, mesh.shard)
        group = self._separate.get(mesh)
        if group is None:
            group = self._separate[mesh] = separate_group(self.group(mesh, mesh.shard))
        return group

    def _buffer(self, comm: Comm, numel: int, dtype: torch.dtype, *, pooled: bool = True) -> Tensor:
        if pooled and _takes_default_memory(comm):
            return self.pool.take(numel, dtype)
        out = comm.allocate((numel,), dtype=dtype, device=self.device)
        found = (tuple(out.shape), out.dtype, out.device.type, out.is_contiguous())
        if found != ((numel,), dtype, self.device.type, True):
            raise BackendError(
                f"{type(comm).__name__}.allocate(({numel},), dtype={dtype}, device={self.device}) gave a tensor of "
                f"shape {found[0]} and dtype {out.dtype} on {out.device}{'' if found[3] else ', not contiguous'}"
            )
        return out

    def _from_group(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> Tensor:
        backend: Any = group._get_backend(self.device)
        if backend.supports_tensor_alloc(self.device):
            buffer: Tensor = backend.allocate_tensor(numel, dtype=dtype, device=self.device)
            return buffer
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _run_hook(self, hook: Callable[[Tensor], None], buffer: Tensor) -> None:
        stream = self.comm.all_reduce_hook_stream
        if stream is None:
            with torch.no_grad():
                hook(buffer)
            return
        module = torch.get_device_module(self.device.type)
        current = module.current_stream()
        stream.wait_stream(current)
        try:
            with torch.no_grad(), module.stream(stream) if self.device.type != "cpu" else nullcontext():
                hook(buffer)
        finally:
            current.wait_stream(stream)  # so the buffer can be freed on the current stream at any time


# The default process group: rank set: the group of reduce-scatters among these.
_SEPARATE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def separate_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group over the ranks of ``group``, the same one for all callers. Communicates among these ranks when it
    is first asked for."""
    ranks = tuple(dist.get_process_group_ranks(group))
    made = _SEPARATE.setdefault(dist.distributed_c10d._get_default_group(), {})
    if made.get(ranks) not in dist.distributed_c10d._world.pg_map:  # never made, or destroyed since
        made[ranks] = dist.new_group(
            list(ranks),
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,
            group_desc="hsdp_reduce_scatter",
        )
    return made[ranks]


# ---------------------------------------------------------------------------------------------------------------- parts


class _Once:
    """A custom collective's handle. States share handles and may wait twice; a custom one is asked once."""

    __slots__ = ("_failure", "_work")

    def __init__(self, work: Any) -> None:
        self._work = work
        self._failure: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> None:
        work, self._work = self._work, None
        if work is not None:
            try:
                work.wait()
            except BaseException as error:
                self._failure = error
                raise
        elif self._failure is not None:
            raise self._failure


def _handle(comm: Comm, work: Any) -> Any:
    if work is None or isinstance(work, dist.Work):
        return work
    if not callable(getattr(work, "wait", None)):
        raise BackendError(f"{type(comm).__name__} must return None or something with wait(), it returned {work!r}")
    return _Once(work)


def _takes_default_memory(comm: Comm) -> bool:
    return getattr(type(comm), "allocate", None) is DefaultMemory.allocate


def _require_comm(what: str, protocol: str, comm: object) -> None:
    if comm is None:
        return
    missing = "" if callable(getattr(comm, "allocate", None)) else "has no method allocate(size, *, dtype, device)"
    if isinstance(comm, type):
        missing = "is a class; give an instance"
    elif not callable(comm):
        missing += (" and " if missing else "") + "isn't callable"
    if missing:
        raise TypeError(f"a custom {what} must be like hsdp_fn_torch.comm.{protocol}: {comm!r} {missing}")
