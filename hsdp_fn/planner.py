"""From names, shapes and a mesh to a layout: a pure function, without communication, the same on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

from .dtypes import is_compute_float
from .errors import LayoutError, PolicyError
from .layout import (
    ROOT,
    Bucket,
    Collective,
    Flat,
    Layout,
    Member,
    OnMesh,
    ParamSpec,
    Placement,
    Regather,
    Replicate,
    Shard,
    UnitLayout,
    UnitSpec,
)
from .mesh import DataParallelMeshDims, MeshSpec
from .policy import MixedPrecisionPolicy, OffloadPolicy, PrefetchPolicy, ReductionPolicy

#: One value for all units, or by their names: a mapping, or a function of the name that may answer None.
Reshard = bool | int | Mapping[str, bool | int] | Callable[[str], bool | int | None] | None
PlacementFn = Callable[[ParamSpec], Placement | OnMesh | None]


def plan_layout(
    params: Iterable[ParamSpec],
    mesh: MeshSpec,
    units: Sequence[str | UnitSpec] = (),
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reduction: ReductionPolicy | None = None,
    prefetch: PrefetchPolicy | None = None,
    reshard_after_forward: Reshard = None,
    fused: bool = True,
    placement_fn: PlacementFn | None = None,
    ignored: Iterable[str] = (),
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Layout:
    """Plan which rank owns what. Pure: no communication, no framework, the same result on every rank.

    Args:
        params: all parameters of the model, tied ones once with their further names as aliases.
        mesh: of units and parameters without one of their own.
        units: what to gather together, in execution order; what no unit claims belongs to the root unit, first.
        mp_policy, offload_policy, reduction, prefetch: policies; None takes each class's defaults.
        reshard_after_forward: of units that don't say it themselves: True, False, or the size of the groups of
            neighbouring shard ranks that keep the parameters between forward and backward, which must divide the
            number of shard ranks (1 means False, with a warning; all of them: True). One value, a mapping from unit
            names, or a function of the name. None means True for named units and False for the root, whose parameters
            are needed again at once in backward (FSDP2's rule).
        fused: default of units. True puts parameters of one mesh and dtype into one bucket; False makes each parameter
            a bucket: one all-gather, one reduce-scatter and (HSDP) one all-reduce a parameter.
        placement_fn: called once a parameter; `Shard`, `Replicate`, either of them `OnMesh` with a mesh of the
            parameter's own, or None for ``Shard(0)``.
        ignored: names of parameters to leave out.
        dp_mesh_dims: which axes of ``mesh`` carry data parallelism; None: those that the mesh says.

    Raises:
        MeshError: ``dp_mesh_dims`` names an axis that isn't there.
        LayoutError: a duplicate name, a unit without parameters, a scalar parameter, a shard dim out of range, tied
            names in different units, a master dtype that can't be trained; naming the parameter or unit.
    """
    _check_types(mesh, units, mp_policy, offload_policy, reduction, prefetch)
    if dp_mesh_dims is not None:
        mesh = mesh.with_roles(dp_mesh_dims)
    specs = list(params)
    wanted = [UnitSpec(u) if isinstance(u, str) else u for u in units]
    _check_names(specs, wanted)
    by_name = reshard_after_forward if isinstance(reshard_after_forward, Mapping) else {}
    if strangers := set(by_name) - {ROOT, *(u.name for u in wanted)}:
        raise LayoutError(f"reshard_after_forward names units that aren't there: {sorted(strangers)}")
    left_out = _check_ignored(specs, ignored)
    default_mp, default_reduction = mp_policy or MixedPrecisionPolicy(), reduction or ReductionPolicy()
    owned: dict[str, list[ParamSpec]] = {ROOT: [], **{u.name: [] for u in wanted}}
    for spec in specs:
        if spec.name in left_out:
            continue
        owned[_owner(spec, wanted)].append(spec)
    if owned[ROOT] and all(u.name != ROOT for u in wanted):
        wanted = [UnitSpec(ROOT), *wanted]
    plans = []
    for unit in wanted:
        members = owned[unit.name]
        if not members:
            raise LayoutError(
                f"unit {unit.name!r} owns no parameter: no name starts with {unit.modules or (unit.name,)}, or more "
                f"specific units claim them all. Remove it, or check the prefix."
            )
        where = unit.mesh or mesh
        reshard = _reshard_of(unit, reshard_after_forward, where.shard_size)
        fuse = fused if unit.fused is None else unit.fused
        if not isinstance(fuse, bool):
            raise LayoutError(f"unit {unit.name!r}: fused must be a bool, found {fuse!r}")
        mp = unit.mp_policy or default_mp
        buckets = _plan_buckets(unit.name, members, where, mp, fuse, placement_fn, reshard)
        plans.append(
            UnitLayout(
                unit.name,
                unit.modules or (unit.name,),
                tuple(members),
                buckets,
                where,
                reshard,
                mp,
                unit.reduction or default_reduction,
            )
        )
    plans.sort(key=lambda plan: plan.name != ROOT)
    return Layout(
        tuple(plans),
        mesh,
        default_reduction,
        prefetch or PrefetchPolicy(),
        offload_policy or OffloadPolicy(),
        tuple(sorted(left_out)),
    )


def _check_types(mesh: object, units: object, mp: object, offload: object, reduction: object, prefetch: object) -> None:
    if not isinstance(mesh, MeshSpec):
        raise LayoutError(f"mesh must be a MeshSpec, found {mesh!r}")
    if isinstance(units, str) or not isinstance(units, Iterable):
        raise LayoutError(f"units must be a sequence of names and UnitSpecs, found {units!r}")
    kinds = (
        ("mp_policy", mp, MixedPrecisionPolicy),
        ("offload_policy", offload, OffloadPolicy),
        ("reduction", reduction, ReductionPolicy),
        ("prefetch", prefetch, PrefetchPolicy),
    )
    for name, value, kind in kinds:
        if value is not None and not isinstance(value, kind):
            raise LayoutError(f"{name} must be a {kind.__name__} or None, found {value!r}")


def _check_names(specs: Sequence[ParamSpec], units: Sequence[UnitSpec]) -> None:
    for unit in units:
        if not isinstance(unit, UnitSpec):
            raise LayoutError(f"a unit must be a name or a UnitSpec, found {unit!r}")
        if isinstance(unit.modules, str) or not isinstance(unit.modules, Sequence):
            raise LayoutError(f"unit {unit.name!r}: modules must be a tuple of prefixes, found {unit.modules!r}")
        if unit.mp_policy is not None and not isinstance(unit.mp_policy, MixedPrecisionPolicy):
            raise LayoutError(f"unit {unit.name!r}: mp_policy must be a MixedPrecisionPolicy, found {unit.mp_policy!r}")
        if unit.mesh is not None and not isinstance(unit.mesh, MeshSpec):
            raise LayoutError(f"unit {unit.name!r}: mesh must be a MeshSpec, found {unit.mesh!r}")
        if unit.reduction is not None and not isinstance(unit.reduction, ReductionPolicy):
            raise LayoutError(f"unit {unit.name!r}: reduction must be a ReductionPolicy, found {unit.reduction!r}")
    seen: set[str] = set()
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            if name in seen:
                raise LayoutError(f"parameter name {name!r} appears twice; give a tied tensor once, with aliases")
            seen.add(name)
    names = [u.name for u in units]
    if double := {n for n in names if names.count(n) > 1}:
        raise LayoutError(f"unit names must be unique; given twice: {sorted(double)}")
    if not specs:
        raise LayoutError("there is no parameter to shard")


def _check_ignored(specs: Sequence[ParamSpec], ignored: Iterable[str]) -> set[str]:
    """All names of the ignored parameters, aliases included."""
    tied = {name: (s.name, *s.aliases) for s in specs for name in (s.name, *s.aliases)}
    if isinstance(ignored, str):
        raise LayoutError(f"ignored must hold names, found the string {ignored!r}")
    ignored = list(ignored)
    if unknown := [n for n in ignored if n not in tied]:
        raise LayoutError(f"ignored names that are no parameter: {unknown}")
    return {name for n in ignored for name in tied[n]}


def _owner(spec: ParamSpec, units: Sequence[UnitSpec]) -> str:
    """Name of the unit with the longest prefix of the parameter's name; else the root."""

    def owner_of(name: str) -> str:
        best: tuple[int, str] | None = None
        for unit in units:
            for prefix in unit.modules or (unit.name,):
                if name == prefix or name.startswith(prefix + "."):
                    if best is not None and best[0] == len(prefix) and best[1] != unit.name:
                        raise LayoutError(f"prefix {prefix!r} is claimed by units {best[1]!r} and {unit.name!r}")
                    if best is None or len(prefix) > best[0]:
                        best = (len(prefix), unit.name)
        return best[1] if best else ROOT

    owner = owner_of(spec.name)
    for alias in spec.aliases:
        if (other := owner_of(alias)) != owner:
            raise LayoutError(
                f"parameter {spec.name!r} is tied to {alias!r}, but they belong to different units ({owner or '(root)'}"
                f" and {other or '(root)'}), which would untie them. Put both modules into one unit."
            )
    return owner


def reshard_size(value: object, ranks: int, what: str) -> bool | int:
    """What a ``reshard_after_forward`` means for ``ranks`` shard ranks: True, False, or the size of groups strictly
    between one rank and all of them. Warns that 1 means False.

    Raises:
        PolicyError: (a `ValueError`) of another type, or no divisor of ``ranks``; beginning with ``what``.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise PolicyError(f"{what}: reshard_after_forward must be a bool, an int or None, found {value!r}")
    if value < 1 or ranks % value:
        raise PolicyError(
            f"{what}: reshard_after_forward={value} doesn't divide the number of shard ranks, {ranks}; give a bool or "
            f"one of {[n for n in range(2, ranks) if ranks % n == 0]}"
        )
    if value == 1:
        warnings.warn(
            f"{what}: reshard_after_forward=1 keeps whole parameters on each rank: it means False", stacklevel=4
        )
        return False
    return True if value == ranks else value


def _reshard_of(unit: UnitSpec, default: Reshard, ranks: int) -> bool | int:
    value: object = unit.reshard_after_forward
    if value is None:
        by_name = default.get(unit.name) if isinstance(default, Mapping) else default
        value = by_name(unit.name) if callable(by_name) else by_name
        if ranks == 1 and type(value) is int and value > 1:
            return True  # a number for all units passes over those that aren't split
    return unit.name != ROOT if value is None else reshard_size(value, ranks, f"unit {unit.name!r}")


def _plan_buckets(
    unit: str,
    specs: Sequence[ParamSpec],
    mesh: MeshSpec,
    mp: MixedPrecisionPolicy,
    fused: bool,
    placement_fn: PlacementFn | None,
    reshard: bool | int,
) -> tuple[Bucket, ...]:
    groups: dict[tuple[MeshSpec, str, int], list[tuple[int, ParamSpec, int]]] = {}
    for index, spec in enumerate(specs):
        wanted, own = (placement_fn(spec) if placement_fn else None) or Shard(0), mesh
        placement = wanted.placement if isinstance(wanted, OnMesh) else wanted
        if isinstance(wanted, OnMesh):
            own = wanted.mesh
            if not isinstance(own, MeshSpec):
                raise LayoutError(f"placement of {spec.name!r}: its mesh must be a MeshSpec, found {own!r}")
        if not spec.shape:
            raise LayoutError(f"parameter {spec.name!r} is a scalar; make it a 1-D tensor of one element")
        if isinstance(placement, Shard):
            dim, where = _check_shardable(spec, placement), own
        elif isinstance(placement, Replicate):
            dim, where = 0, own.as_replicated()
        else:
            raise LayoutError(
                f"placement of {spec.name!r} must be Shard, Replicate, OnMesh or None, found {placement!r}"
            )
        if type(reshard) is int and where.shard_size > 1:
            reshard_size(reshard, where.shard_size, f"parameter {spec.name!r} of unit {unit!r}")
        if not is_compute_float(spec.dtype) and spec.requires_grad:
            raise LayoutError(f"parameter {spec.name!r} of dtype {spec.dtype} can't require gradients; freeze it")
        groups.setdefault((where, spec.dtype, 0 if fused else index), []).append((index, spec, dim))
    return tuple(
        _plan_bucket(
            unit, i, where, dtype, members, mp, max(mesh.data_parallel_size, where.data_parallel_size), reshard
        )
        for i, ((where, dtype, _), members) in enumerate(groups.items())
    )


def _plan_bucket(
    unit: str,
    index: int,
    mesh: MeshSpec,
    dtype: str,
    members: list[tuple[int, ParamSpec, int]],
    mp: MixedPrecisionPolicy,
    mean_over: int,
    reshard: bool | int,
) -> Bucket:
    compute = mp.param_dtype if mp.param_dtype and is_compute_float(dtype) else dtype
    reduce = mp.reduce_dtype or compute
    params = _plan_flat(members, mesh.shard_size)
    trainable = [m for m in members if m[1].requires_grad]
    grads = params if len(trainable) == len(members) else _plan_flat(trainable, mesh.shard_size) if trainable else None
    shard, replicate, regather = mesh.shard_size, mesh.replicate_size, None

    def collective(op: str, of: str, flat: Flat | None, group: int, whole: int) -> Collective | None:
        if flat is None or group == 1 or flat.numel == 0:
            return None
        return Collective(op, unit, index, of, flat.numel * whole, group, flat.padding if whole == group else 0)

    if type(reshard) is int and reshard < shard:
        cut = _plan_flat(members, reshard)
        regather = Regather(mesh.cut(reshard), cut, collective("all_gather", compute, cut, reshard, reshard))
    return Bucket(
        index,
        mesh,
        dtype,
        compute,
        reduce,
        reduce if mp.apply_grad_on_fp32_main_grad else dtype,
        mean_over,
        params,
        grads,
        gather=collective("all_gather", compute, params, shard, shard),
        reduce_scatter=collective("reduce_scatter", reduce, grads, shard, shard),
        all_reduce=collective("all_reduce", reduce, grads, replicate, 1),
        regather=regather,
    )


def _plan_flat(members: Iterable[tuple[int, ParamSpec, int]], shard_size: int) -> Flat:
    placed, offset = [], 0
    for index, spec, dim in members:
        chunk = -(-spec.shape[dim] // shard_size)
        numel = prod(spec.shape[:dim]) * chunk * prod(spec.shape[dim + 1 :])
        placed.append(Member(index, spec, dim, chunk, offset, numel))
        offset += numel
    return Flat(tuple(placed), shard_size, offset)


def _check_shardable(spec: ParamSpec, placement: Shard) -> int:
    ndim = len(spec.shape)
    if type(placement.dim) is not int:
        raise LayoutError(f"placement of {spec.name!r}: a shard dim is an int, found {placement.dim!r}")
    dim = placement.dim + ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < ndim:
        raise LayoutError(f"Shard({placement.dim}) of parameter {spec.name!r} is out of range for shape {spec.shape}")
    return dim
