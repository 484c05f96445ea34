"""What a framework has to provide: storage, four copies, three collectives. Everything else is in the core.

A backend is bound to one rank's process groups (or, for the numpy reference, to all ranks at once). Tensors are opaque
to the core. Methods that communicate say so; the core calls them in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from .layout import Flat, Layout, Member
from .mesh import MeshSpec

#: A framework's tensor.
Tensor = Any
#: A running collective; None when it has already finished.
Handle = Any


class Backend(Protocol):
    """The protocol between the core and a framework."""

    name: str

    def check(self, layout: Layout) -> None:
        """Raise `MeshError` or `BackendError` when this layout can't run here. Does not communicate."""
        ...

    def exchange(self, message: str) -> dict[int, str]:
        """Communicates: messages by rank, in rank order, of all that this rank communicates with on the backend's own
        mesh. Control plane, so that ranks fail together: no step calls it unless asked to compare or to recover."""
        ...

    def votes(self, mine: bool) -> int:
        """Communicates: how many of the ranks that `exchange` reaches say yes. One element over the shard group and,
        where there is one, over the replicate group."""
        ...

    def prepare(self, layout: Layout) -> None:
        """Communicates where process groups have to be made: all that the layout needs, in the same order on every
        rank. Called by `shard`, after all ranks have agreed on the layout."""
        ...

    def storage(self, tensor: Tensor) -> int:
        """An identity of the memory that the tensor is a view of."""
        ...

    def objection(self, param: Tensor) -> str | None:
        """Why this tensor can't be a parameter ("isn't contiguous"), or None."""
        ...

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Shape as seen by one rank."""
        ...

    def dtype(self, tensor: Tensor) -> str:
        """Dtype by neutral name."""
        ...

    def nbytes(self, tensor: Tensor) -> int:
        """Bytes that one rank holds for this tensor."""
        ...

    def local_shape(self, mesh: MeshSpec, member: Member) -> tuple[int, ...]:
        """Shape of this rank's rows of a parameter, as `split` gives and `join` takes them."""
        ...

    def zeros(self, numel: int, dtype: str) -> Tensor:
        """New 1-D memory of zeros on the compute device."""
        ...

    def shard_params(self, mesh: MeshSpec, flat: Flat, params: Sequence[Tensor]) -> Tensor:
        """Full parameters to this rank's new flat shard, padding zeroed, where the layout's offload policy keeps it."""
        ...

    def piece(self, mesh: MeshSpec, flat: Flat, full: Sequence[Tensor]) -> Tensor:
        """Full parameters to this rank's new flat shard on the compute device, in their own dtype."""
        ...

    def split(self, mesh: MeshSpec, flat: Flat, shard: Tensor) -> tuple[Tensor, ...]:
        """Views of this rank's rows, one a member, without padding."""
        ...

    def join(self, mesh: MeshSpec, flat: Flat, shard: Tensor, rows: Sequence[Tensor | None]) -> Tensor:
        """A flat shard with these rows; None keeps the rows of ``shard``. Rows that already are views of ``shard``
        cost nothing and give ``shard`` back."""
        ...

    def load(self, shard: Tensor, dtype: str) -> Tensor:
        """A shard on the compute device in ``dtype``; the same tensor when it is that already."""
        ...

    def store(self, shard: Tensor, dtype: str, factor: float, *, donate: bool) -> Tensor:
        """``shard * factor`` in ``dtype``, where shards are kept, computed in the wider of both dtypes. Writes into
        ``shard`` only if it is donated."""
        ...

    def settle(self) -> None:
        """Block until copies between host and device that `load` and `store` began have ended."""
        ...

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor in ``dtype``; the same object when it is that already."""
        ...

    def add(self, a: Tensor, b: Tensor, dtype: str) -> Tensor:
        """``a + b`` computed and returned in ``dtype``, in new memory."""
        ...

    def clone(self, tensor: Tensor) -> Tensor:
        """A copy that shares no memory."""
        ...

    def pack(self, mesh: MeshSpec, flat: Flat, grads: Sequence[Tensor | None], dtype: str, factor: float) -> Tensor:
        """Full gradients, one a member, to the reduce-scatter's input in ``dtype``, times ``factor``: rank chunks one
        after another, each laid out like a flat shard. None and padding become zeros. Always new memory."""
        ...

    def unpack(self, mesh: MeshSpec, flat: Flat, gathered: Tensor) -> tuple[Tensor, ...]:
        """The all-gather's output to contiguous full parameters, one a member, without padding."""
        ...

    def all_gather(self, mesh: MeshSpec, shard: Tensor) -> tuple[Tensor, Handle]:
        """Communicates: all-gather over the mesh's shard group. Output of ``shard_size`` times the elements."""
        ...

    def reduce_scatter(self, mesh: MeshSpec, packed: Tensor) -> tuple[Tensor, Handle]:
        """Communicates: sum reduce-scatter over the shard group. Output of ``1 / shard_size`` of the elements."""
        ...

    def all_reduce(self, mesh: MeshSpec, buffer: Tensor) -> tuple[Tensor, Handle]:
        """Communicates: sum all-reduce over the replicate group, in place where the framework can."""
        ...

    def wait(self, handle: Handle) -> None:
        """Order the caller (the current stream, or the host) after a collective. Raises what the collective raised."""
        ...


class RankBackend(Backend, Protocol):
    """The backend of one rank, which may fail alone. What its `wait` raises has an attribute ``_hsdp_collective`` that
    is True: peers can't be freed then."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def spec(self) -> MeshSpec:
        """The backend's own mesh."""
        ...

    def limited(self, seconds: float | None) -> AbstractContextManager[None]:
        """Inside, waiting for one collective takes at most so long (None: as the process groups say)."""
        ...
