"""The parameters of one `fully_shard` call: sharded, and standing in their cells.

Each `Parameter` is replaced by one that holds this rank's rows (MindSpore's autograd never forgets a parameter's first
shape), in memory of its own, since MindSpore's optimizers can't write into views. The masters of the state are a copy,
brought up to date when the next forward begins. A group keeps its own one-unit layout; the tree that takes it over
plans all groups together, with fully qualified names.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hsdp_fn import LayoutError, MeshSpec, OnMesh, ParamSpec, Replicate, Shard, UnitState, plan_layout
from hsdp_fn.dtypes import dtype_name
from hsdp_fn.handling import Handling
from hsdp_fn.layout import Layout, Placement, UnitLayout
from hsdp_fn.rollback import Gradients
from hsdp_fn.settings import Settings

from .backend import MSBackend
from .binding import Slot, named_cells
from .model import require_compute_dtypes
from .probe import settle

#: What `fully_shard` may be given to place a parameter: None is ``Shard(0)``.
PlacementFn = Callable[[Parameter], Placement | OnMesh | None]
_SAMPLES = 1024


class Original(NamedTuple):
    """A parameter that was replaced by a sharded one: MindSpore gives zeros for it if it is asked for its gradient."""

    ref: weakref.ref[Parameter]
    shape: tuple[int, ...]


@dataclass(eq=False)
class Group:
    """One unit of the facade.

    Attributes:
        modules: cells that were given to `fully_shard`; they run as one unit.
        spec, backend: over what it is sharded and what communicates.
        settings, handling: what the setters change.
        layout: of this group alone. None for a group without parameters.
        slots: for every name of every parameter, the cell that it stands in.
        params: the parameters, in the layout's order; ``wanted``: how each was to be placed.
        unit: the masters, until a tree takes them over.
        initial: a fingerprint of the whole parameters when they were sharded.
        originals: what stood there before, as far as somebody still holds it.
        to_run: cells that have yet to run in this pass through the group.
    """

    modules: list[nn.Cell]
    spec: MeshSpec
    backend: MSBackend
    settings: Settings
    handling: Handling = field(default_factory=Handling)
    layout: Layout | None = None
    slots: tuple[Slot, ...] = ()
    params: tuple[Parameter, ...] = ()
    wanted: tuple[Placement | OnMesh, ...] = ()
    unit: UnitState | None = None
    initial: str = ""
    originals: tuple[Original, ...] = ()
    to_run: set[int] = field(default_factory=set)

    # -- fully_shard --------------------------------------------------------------------------------------------

    def shard(
        self,
        places: Sequence[tuple[str, nn.Cell, str]],
        ignored: Iterable[Parameter],
        replicated: Iterable[Parameter],
        placement_fn: PlacementFn | None,
    ) -> None:
        """Plan and shard the parameters that stand in ``places``. Nothing changes before everything has been checked.

        Raises:
            LayoutError, ValueError: naming the parameter; see `plan_layout`.
        """
        left_out, whole = {id(p) for p in ignored}, {id(p) for p in replicated}
        if both := [name for name, cell, local in places if id(cell._params[local]) in left_out & whole]:
            raise LayoutError(f"parameters {both} are in ignored_params and in replicate_params; leave them in one")
        originals: list[Parameter] = []
        names: list[list[str]] = []
        slots: list[Slot] = []
        known: dict[int, int] = {}
        for name, cell, local in places:
            param = cell._params[local]
            if id(param) in left_out:
                continue
            if (taken := getattr(param, "_hsdp_taken_in", None)) is not None:
                raise LayoutError(
                    f"parameter {name!r} is tied to {taken!r} of another fully_shard call, which would untie them; "
                    f"give both cells to one call: fully_shard([a, b], ...)"
                )
            at = known.setdefault(id(param), len(originals))
            if at == len(originals):
                originals.append(param)
                names.append([])
            names[at].append(name)
            slots.append((cell, local, at))
        if not originals:
            return
        wanted: dict[str, Placement | OnMesh] = {}
        specs = []
        for param, (first, *aliases) in zip(originals, names, strict=True):
            if (objection := self.backend.objection(param)) is not None:
                raise LayoutError(f"parameter {first!r} {objection}")
            replicate = self.settings.whole or id(param) in whole
            wanted[first] = Replicate() if replicate else _placement(param, first, placement_fn)
            dtype = dtype_name(param.dtype)
            specs.append(ParamSpec(first, tuple(param.shape), dtype, bool(param.requires_grad), tuple(aliases)))
        layout = plan_layout(
            specs,
            self.spec,
            mp_policy=self.settings.mp_policy,
            offload_policy=self.backend.offload,
            fused=self.settings.fused,
            reshard_after_forward=self.settings.reshard_after_forward,
            placement_fn=lambda spec: wanted[spec.name],
        )
        self.backend.check(layout)
        require_compute_dtypes(layout)
        plan = layout.units[0]
        if self.settings.reshard_after_forward is not None:
            self.settings.reshard_after_forward = plan.reshard_after_forward
        masters = tuple(
            [
                self.backend.shard_params(b.mesh, b.params, [originals[m.index] for m in b.params.members])
                for b in plan.buckets
            ]
        )
        self.initial = _fingerprint(originals)
        unit = UnitState("", masters)
        rows = dict(self.rows(plan, unit))
        params = tuple([_sharded(p, rows[at], plan.params[at].name) for at, p in enumerate(originals)])
        empty = [mint.zeros((0,), dtype=p.dtype) for p in originals]
        settle()  # errors of operators come late; from here on nothing may fail
        self.unit, self.params = unit, params
        self.layout, self.slots, self.wanted = layout, tuple(slots), tuple(wanted.values())
        for cell, local, at in slots:
            cell._params[local] = self.params[at]
        self.originals = tuple([_emptied(*each) for each in zip(originals, empty, plan.params, strict=True)])

    # -- what a tree asks ---------------------------------------------------------------------------------------

    @property
    def hybrid(self) -> bool:
        """Whether a mesh of it both shards and replicates."""
        buckets = self.layout.units[0].buckets if self.layout is not None else ()
        return any(mesh.shard and mesh.replicate for mesh in [self.spec, *(b.mesh for b in buckets)])

    def unit_backend(self) -> MSBackend:
        """What the group communicates with."""
        return self.backend

    def specs(self, root: nn.Cell) -> list[ParamSpec]:
        """The parameters with names as seen from the root of a tree, and as trainable as they are now."""
        if self.layout is None:
            return []
        prefixes: dict[int, list[str]] = {}  # a cell may stand under several names
        for name, cell in named_cells(root):
            prefixes.setdefault(id(cell), []).append(name)
        names: list[list[str]] = [[] for _ in self.params]
        for cell, local, at in self.slots:
            found = [f"{prefix}.{local}" if prefix else local for prefix in prefixes.get(id(cell), ())]
            names[at] += [name for name in found if name not in names[at]]
        out = []
        for spec, param, found in zip(self.layout.units[0].params, self.params, names, strict=True):
            first, *aliases = found or [f"(removed) {spec.name}"]
            trainable = bool(param.requires_grad)
            out.append(replace(spec, name=first, aliases=tuple(aliases), requires_grad=trainable))
        return out

    def require_home(self, below: Set[int]) -> None:
        """Do the parameters stand where `fully_shard` has put them?

        Args:
            below: identities of the cells at and below the root.

        Raises:
            RuntimeError: naming the parameter, as it was called when it was sharded.
        """
        for cell, local, at in self.slots:
            if id(cell) not in below or cell._params.get(local) is not self.params[at]:
                where = "" if id(cell) in below else "stands in a cell that "
                raise RuntimeError(
                    f"parameter {self.params[at]._hsdp_taken_in!r} of {type(self.modules[0]).__name__} {where}was "
                    f"replaced or removed after fully_shard; copy into the one that stood there (load_state_dict, "
                    f"param.copy_)"
                )

    def facts(self) -> object:
        """What the plan depends on and users can change."""
        return self.settings.mp_policy, [bool(p.requires_grad) for p in self.params]

    def rows(self, plan: UnitLayout, unit: UnitState) -> Iterator[tuple[int, Tensor]]:
        """This rank's rows of every parameter in the masters, with the parameter's index. Views."""
        for bucket, master in zip(plan.buckets, unit.master, strict=True):
            parts = self.backend.split(bucket.mesh, bucket.params, master)
            for member, row in zip(bucket.params.members, parts, strict=True):
                yield member.index, row

    def changed(self, plan: UnitLayout, unit: UnitState) -> bool:
        """Whether any parameter has other values than the masters: MindSpore doesn't count versions, so they are
        compared.

        Raises:
            RuntimeError: another shape or dtype; names it.
        """
        differ = False
        for at, row in self.rows(plan, unit):
            param = self.params[at]
            if tuple(param.shape) != tuple(row.shape) or param.dtype != row.dtype:
                raise RuntimeError(
                    f"parameter {plan.params[at].name!r} was converted after fully_shard: found {tuple(param.shape)} "
                    f"of {param.dtype}, expected this rank's rows, {tuple(row.shape)} of {row.dtype}"
                )
            differ = differ or not _same(param, row)
        return differ

    def adopt(self, plan: UnitLayout, unit: UnitState) -> UnitState:
        """The unit with masters of the parameters' present values."""
        masters = [
            self.backend.join(b.mesh, b.params, master, [self.params[m.index] for m in b.params.members])
            for b, master in zip(plan.buckets, unit.master, strict=True)
        ]
        return replace(unit, master=tuple(masters), full=None)

    def gradients(self, plan: UnitLayout, unit: UnitState) -> Iterator[tuple[Parameter, Tensor, str]]:
        """The finished gradient of the unit, rows like the parameters', and the attribute that it is for."""
        where = "main_grad" if plan.mp_policy.apply_grad_on_fp32_main_grad else "grad"
        for bucket, flat in zip(plan.buckets, unit.grad.flats if unit.grad else (), strict=False):
            if flat is None or bucket.grads is None or unit.grad is None:
                continue
            rows = self.backend.split(bucket.mesh, bucket.grads, flat)
            for member, row in zip(bucket.grads.members, rows, strict=True):
                param = self.params[member.index]
                if unit.grad.present[member.index] and param.requires_grad and row.size:
                    yield param, row, where

    def runs(self, cell: nn.Cell) -> Callable[[], bool]:
        """One of the cells begins to run. What is returned tells, when it has run, whether all of them have."""
        if not self.to_run:
            self.to_run.update(id(m) for m in self.modules)

        def ran() -> bool:
            if id(cell) not in self.to_run:
                return False
            self.to_run.discard(id(cell))
            return not self.to_run

        return ran


def hooked(gradients: Gradients) -> Gradients:
    """Gradients as the parameters' own hooks (``register_hook``) make them. These run before anything is added, so that
    one which raises leaves nothing added."""
    out = []
    for param, grad, where in gradients:
        for hook in param.hooks():
            grad = hook(grad)
        out.append((param, grad, where))
    return out


def deliver(gradients: Gradients) -> None:
    """Add finished gradients, after `hooked`, to the parameters' ``.grad`` (or ``.main_grad``)."""
    for param, grad, where in gradients:
        name = "_grad" if where == "grad" else where  # ``.grad`` is that, where the compatibility layer is on
        held = getattr(param, name, None)
        setattr(param, name, grad if held is None else ops.add(held, grad))


def group_of(cell: Any) -> Group:
    """The unit that the cell belongs to."""
    group: Group = cell.__dict__["_hsdp_group"]
    return group


def groups_of(cell: nn.Cell, recurse: bool = True) -> list[Group]:
    """The cell's unit, if it has one, and with ``recurse`` those of the cells below, each once."""
    cells = [c for _, c in named_cells(cell)] if recurse else [cell]
    return list(dict.fromkeys(c.__dict__["_hsdp_group"] for c in cells if "_hsdp_group" in c.__dict__))


def _placement(param: Parameter, name: str, placement_fn: PlacementFn | None) -> Placement | OnMesh:
    wanted = placement_fn(param) if placement_fn is not None else None
    if wanted is None:
        return Shard(0)
    if not isinstance(wanted, (Shard, Replicate, OnMesh)):
        raise ValueError(
            f"shard_placement_fn must return a Shard, Replicate or OnMesh of hsdp_fn, or None, found {wanted!r} for "
            f"parameter {name!r}"
        )
    return wanted


def _sharded(original: Parameter, row: Tensor, name: str) -> Parameter:
    """A parameter of this rank's rows, with the original's name, hooks, and what users have set on it."""
    param = Parameter(row.copy(), name=original.name, requires_grad=bool(original.requires_grad))
    for key, value in vars(original).items():
        vars(param).setdefault(key, value)
    for hook in original.hooks() if original.requires_grad else ():
        param.register_hook(partial(_unless_removed, original, hook))
    param._hsdp_taken_in = name  # by this call
    return param


def _unless_removed(original: Parameter, hook: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
    """A hook of the original's; its handle removes it there."""
    return hook(grad) if any(known is hook for known in original.hooks()) else grad


def _emptied(original: Parameter, empty: Tensor, spec: ParamSpec) -> Original:
    """The original without its values. Who still holds it is to notice: a gradient of it is an error."""

    def hook(grad: Tensor) -> Tensor:
        raise RuntimeError(
            f"the gradient of parameter {spec.name!r} was asked for as it was before fully_shard, which has replaced "
            f"it; take the weights (and make the optimizer) afterwards, from cell.trainable_params()"
        )

    original.set_data(empty, slice_shape=True)
    original._hsdp_taken_in = spec.name
    if original.requires_grad:
        original.register_hook(hook)
    return Original(weakref.ref(original), spec.shape)


def _same(param: Parameter, row: Tensor) -> bool:
    """Equal values, NaN like NaN."""
    if not row.size:
        return True
    a, b = Tensor(param), row
    if dtype_name(a.dtype) == "bfloat16":  # which CPU can't compare
        a, b = a.float(), b.float()
    if bool(ops.equal(a, b).all()):
        return True
    if not a.is_floating_point():
        return False
    return bool(ops.logical_or(ops.equal(a, b), ops.logical_and(ops.isnan(a), ops.isnan(b))).all())


def _fingerprint(params: Iterable[Parameter]) -> str:
    """A hash of up to 1,024 evenly spaced values of each parameter."""
    digest = hashlib.sha256()
    for param in params:
        flat = Tensor(param).reshape(-1)
        sample = flat[:: max(1, -(-flat.size // _SAMPLES))]
        if dtype_name(sample.dtype) == "bfloat16":
            sample = sample.float()
        digest.update(np.ascontiguousarray(sample.asnumpy()).tobytes())
    return digest.hexdigest()[:16]
