"""The numpy reference backend, counting what it is asked for, strict about memory, and failing on demand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hsdp_fn import HSDPState, MeshSpec, Pending
from hsdp_fn.reference import Flight, ReferenceBackend

Array = npt.NDArray[Any]


class InjectedFault(RuntimeError):
    """What `Probe` raises."""


class Probe(ReferenceBackend):
    """`ReferenceBackend` with eyes.

    Args:
        mesh: as for `ReferenceBackend`.
        fault: ``("launch", k)`` or ``("wait", k)``: the k-th such call raises before it does anything. ``("issued",
            k)``, ``("landed", k)``: it raises when it has done it, so that nobody has its handle.
        lasting: a collective whose wait failed fails every later wait too, and its output stays poisoned.
        in_place: all-reduce writes into its input, and store into a shard it is donated, as `Backend` allows.

    Attributes:
        issued: ``(op, bytes of the larger buffer, group size)`` of each collective, one rank's view.
        in_flight: collectives that were issued and not awaited.
        calls: how many of each of these moments there were.
    """

    def __init__(
        self,
        mesh: MeshSpec,
        *,
        fault: tuple[str, int] | None = None,
        lasting: bool = False,
        in_place: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.fault, self.lasting, self.in_place = fault, lasting, in_place
        self.issued: list[tuple[str, int, int]] = []
        self.in_flight: set[Flight] = set()
        self.calls = {"launch": 0, "issued": 0, "wait": 0, "landed": 0}
        self._dead: set[Flight] = set()
        self._landed: set[Flight] = set()

    def all_gather(self, mesh: MeshSpec, shard: Array) -> tuple[Array, Flight]:
        self._count("launch")
        output, flight = super().all_gather(mesh, shard)
        return self._record("all_gather", output, flight, output.nbytes, mesh, mesh.shard)

    def reduce_scatter(self, mesh: MeshSpec, packed: Array) -> tuple[Array, Flight]:
        self._count("launch")
        output, flight = super().reduce_scatter(mesh, packed)
        return self._record("reduce_scatter", output, flight, packed.nbytes, mesh, mesh.shard)

    def all_reduce(self, mesh: MeshSpec, buffer: Array) -> tuple[Array, Flight]:
        self._count("launch")
        output, flight = super().all_reduce(mesh, buffer)
        if self.in_place:
            output, flight = buffer, Flight(buffer, flight.value)
        return self._record("all_reduce", output, flight, buffer.nbytes, mesh, mesh.replicate)

    def store(self, shard: Array, dtype: str, factor: float, *, donate: bool) -> Array:
        out = super().store(shard, dtype, factor, donate=donate)
        if donate and self.in_place and out is not shard:
            shard[...] = np.nan  # whoever reads a donated shard sees it
        return out

    def wait(self, handle: Flight | None) -> None:
        if handle is None:
            return
        self.in_flight.discard(handle)
        if handle in self._dead:
            raise InjectedFault("this collective failed before")
        try:
            self._count("wait")
        except InjectedFault:
            if self.lasting:
                self._dead.add(handle)
            raise
        if handle not in self._landed:  # like a work handle: waiting again writes nothing
            self._landed.add(handle)
            super().wait(handle)
        self._count("landed")

    def _count(self, kind: str) -> None:
        index = self.calls[kind]
        self.calls[kind] += 1
        if self.fault == (kind, index):
            raise InjectedFault(f"{kind} {index}")

    def _record(
        self, op: str, output: Array, flight: Flight, nbytes: int, mesh: MeshSpec, axes: tuple[str, ...]
    ) -> tuple[Array, Flight]:
        group = 1
        for axis in axes:
            group *= mesh.shape[mesh.names.index(axis)]
        self._count("issued")
        self.issued.append((op, nbytes // self.mesh.size, group))
        self.in_flight.add(flight)
        return output, flight


def handles(state: HSDPState) -> set[Flight]:
    """Handles of everything that the state has in flight."""
    pending = [p for u in state.units for p in (u.full, u.reducing) if isinstance(p, Pending)]
    return {handle for p in pending for handle in p.handles if handle is not None}
