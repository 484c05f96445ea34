"""Loading values into a module: converted to what each parameter is, by the module's own ``load_state_dict``, or not at
all. What can be checked by names and shapes is checked before. Where the modules' own code has a say (load hooks, an
overridden ``_load_from_state_dict``), the tensors are kept aside and put back if it fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import is_lazy

from hsdp_fn import LayoutError

from .dtensor import as_dtensor
from .group import groups_of

Agree = Callable[[Exception | None, Iterable[str]], None]
_ASSIGN = "assign_to_params_buffers"  # how nn.Module tells modules of assign=True


def alone(problem: Exception | None, keys: Iterable[str]) -> None:
    """The `Agree` of a rank that loads by itself."""
    if problem is not None:
        raise problem


@dataclass
class Load:
    """One call.

    Attributes:
        full: whole tensors only.
        agree: raises on every rank if a rank has a problem; called by all ranks, once.
        places: by its id, each sharded parameter with the tables and names where it stands.
        homes: by its id, the device of each parameter of a sharded module.
    """

    module: nn.Module
    assign: bool
    strict: bool
    full: bool = False
    agree: Agree = alone
    places: dict[int, tuple[DTensor, list[tuple[dict[str, Any], str]]]] = field(default_factory=dict)
    homes: dict[int, torch.device] = field(default_factory=dict)

    def run(self, state_dict: Mapping[str, Any]) -> Any:
        """Load, or raise and leave everything as it was."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
        values = OrderedDict(state_dict)
        if (metadata := getattr(state_dict, "_metadata", None)) is not None:
            # Torch marks modules in the caller's own dict, which would turn later loads of it into assignments.
            clean = {k: {n: v for n, v in m.items() if n != _ASSIGN} for k, m in metadata.items()}
            values._metadata = clean  # type: ignore[attr-defined]
        for m in self.module.modules():
            for local, param in m._parameters.items():
                if isinstance(param, DTensor):
                    self.places.setdefault(id(param), (param, []))[1].append((m._parameters, local))
        for group in groups_of(self.module):
            self.homes.update((id(table.get(local)), group.backend.home) for table, local, _ in group.slots)
        return self._guarded(values) if self.custom() else self._checked(values)

    def custom(self) -> bool:
        """Whether code of the modules decides what is loaded and which keys are missing."""
        return _original(self.module).load_state_dict is not nn.Module.load_state_dict or any(
            m._load_state_dict_pre_hooks
            or m._load_state_dict_post_hooks
            or _overrides(m, "_load_from_state_dict")
            or _overrides(m, "set_extra_state")
            for m in self.module.modules()
        )

    def check(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """The targets by key, if names and shapes are right."""
        targets: dict[str, Tensor] = {}
        missing: list[str] = []
        unexpected: list[str] = []
        match_keys(self.module, "", list(values), targets, missing, unexpected)
        errors, misfits = [], []
        if self.strict and missing:
            errors.append("Missing key(s) in state_dict: {}. ".format(", ".join(f'"{k}"' for k in missing)))
        if self.strict and unexpected:
            errors.append("Unexpected key(s) in state_dict: {}. ".format(", ".join(f'"{k}"' for k in unexpected)))
        for key, target in targets.items():
            if isinstance(target, DTensor):
                if (problem := self.misfit(key, target, values[key])) is not None:
                    misfits.append(problem)
            elif (problem := _plain_misfit(key, target, values[key], self.assign)) is not None:
                errors.append(problem)
        if errors:
            name = _original(self.module).__name__
            raise RuntimeError(f"Error(s) in loading state_dict for {name}:\n\t" + "\n\t".join(errors + misfits))
        if misfits:
            raise LayoutError("\n".join(misfits))
        return targets

    def misfit(self, key: str, target: DTensor, value: Any) -> str | None:
        """What is wrong with a value for a sharded parameter."""
        if not isinstance(value, Tensor):
            return f"parameter {key!r}: expected a tensor, found {type(value).__name__}"
        if value.is_meta and not self.assign:
            return f"parameter {key!r}: the value is on the meta device, there is nothing to copy"
        whole, mine = tuple(target.shape), tuple(target._local_tensor.shape)
        found = tuple(value.shape)
        if isinstance(value, DTensor):
            if value.device_mesh != target.device_mesh:
                return (
                    f"parameter {key!r}: expected a DTensor on {target.device_mesh}, found one on {value.device_mesh}; "
                    f"give its full_tensor(), or load through torch.distributed.checkpoint"
                )
            if found != whole:
                return f"parameter {key!r}: expected a DTensor of shape {whole}, found {found}"
            if any(p.is_partial() for p in value.placements):
                return f"parameter {key!r}: expected placements {target.placements}, found {value.placements}"
            return None
        if found == whole or (whole == () and found == (1,)):
            if found != mine and not _can_cut(target):
                return f"parameter {key!r}: can't cut {target.placements} from a whole tensor; give a DTensor"
            return None
        if self.full:
            return f"parameter {key!r}: expected the whole tensor, of shape {whole}, found {found}"
        if found == mine:
            return None
        return (
            f"parameter {key!r}: expected the whole tensor, of shape {whole}, or this rank's shard, of shape {mine}, "
            f"found {found}"
        )

    def convert(self, target: DTensor, value: Tensor) -> DTensor:
        """The value as a DTensor like the target. A whole tensor's shard is a view of it, except for `assign`."""
        if isinstance(value, DTensor):
            if value.placements != target.placements:
                value = value.redistribute(placements=target.placements)
            if not self.assign or value.dtype == target.dtype:
                return value
            return cast(DTensor, value.detach().to(target.dtype))
        rows = value.detach()
        if rows.shape != target._local_tensor.shape:
            rows = cut(target, rows)
            if self.assign:
                rows = rows.clone(memory_format=torch.contiguous_format)
        if self.assign:
            rows = rows.to(rows.device if rows.is_meta else self.home(target), target.dtype)
        return like(target, rows)

    def home(self, target: DTensor) -> torch.device:
        """Where the shards of a parameter are kept."""
        return self.homes.get(id(target), torch.device(target.device_mesh.device_type))

    def materialize(self, target: DTensor) -> None:
        """Give a parameter on the meta device memory, at all its names."""
        if self.assign or not target.is_meta or id(target) not in self.places:
            return
        empty = torch.empty_like(target, device=self.home(target))
        new = nn.Parameter(empty, requires_grad=target.requires_grad)
        _, places = self.places.pop(id(target))
        for table, local in places:
            table[local] = new
        self.places[id(new)] = (cast(DTensor, new), places)

    def _checked(self, values: OrderedDict[str, Any]) -> Any:
        """Everything is known beforehand."""
        problem, targets = None, {}
        try:
            targets = self.check(values)
        except Exception as error:
            problem = error
        self.agree(problem, targets)
        for key, target in targets.items():
            if isinstance(target, DTensor):
                values[key] = self.convert(target, values[key])
        for target in targets.values():
            if isinstance(target, DTensor):
                self.materialize(target)
        return self._call(values)

    def _guarded(self, values: OrderedDict[str, Any]) -> Any:
        """The modules' code runs; if it raises, or another rank's does, tensors are put back."""
        keys, handles = list(values), []
        before = _Snapshot(self.module)
        done = False
        try:
            problem, result = None, None
            try:
                for prefix, m in walk(self.module):
                    if _overrides(m, "_load_from_state_dict"):  # it may copy by itself
                        self._convert_in(m, values, prefix, strict=False)
                for m in self.module.modules():
                    if any(isinstance(t, DTensor) for t in m._parameters.values()):
                        # Behind the module's own hooks, which may rename or reshape.
                        register: Callable[..., Any] = m.register_load_state_dict_pre_hook
                        handles.append(register(self._last_hook))
                result = self._call(values)
            except Exception as error:
                problem = error
            self.agree(problem, keys)
            done = True
            return result
        finally:
            for handle in handles:
                handle.remove()
            if not done:
                before.restore()

    def _last_hook(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self._convert_in(module, state_dict, prefix, strict=True)

    def _convert_in(self, module: nn.Module, values: dict[str, Any], prefix: str, *, strict: bool) -> None:
        """Convert what the module itself will look for; leave or refuse what doesn't fit."""
        for local, target in list(module._parameters.items()):
            key = prefix + local
            if not isinstance(target, DTensor) or key not in values:
                continue
            if (problem := self.misfit(key, target, values[key])) is None:
                values[key] = self.convert(target, values[key])
                if strict:
                    self.materialize(target)
            elif strict:
                raise LayoutError(problem)

    def _call(self, values: OrderedDict[str, Any]) -> Any:
        options = {"assign": True} if self.assign else {}  # an override may not know it
        load: Callable[..., Any] = _original(self.module).load_state_dict
        result = load(self.module, values, strict=self.strict, **options)
        if self.assign:
            for old, places in self.places.values():
                # A new parameter stands at each name that was given; they are one parameter still.
                new = [table[local] for table, local in places if table.get(local, old) is not old]
                for table, local in places if new else ():
                    table[local] = new[-1]
        return result


class _Snapshot:
    """Copies of a module's tensors, and which stand where."""

    def __init__(self, module: nn.Module) -> None:
        self.tables = [(table, dict(table)) for m in module.modules() for table in (m._parameters, m._buffers)]
        tensors = {id(t): t for _, known in self.tables for t in known.values() if t is not None}
        locals_ = [t._local_tensor if isinstance(t, DTensor) else t.detach() for t in tensors.values() if not _lazy(t)]
        self.data = [(t, t.clone()) for t in locals_ if not t.is_meta]

    def restore(self) -> None:
        for table, known in self.tables:
            table.clear()
            cast("dict[str, Any]", table).update(known)
        with torch.no_grad():
            for tensor, copy in self.data:
                tensor.copy_(copy)


def cut(target: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, a view. A strided placement splits what those to its right on the same dim
    have left (tensor parallelism cuts first, though its axis comes last)."""
    rows: Tensor = whole.reshape(target.shape)
    axes = [(axis, p) for axis, p in enumerate(target.placements) if isinstance(p, (Shard, _StridedShard))]
    for axis, placement in sorted(axes, key=lambda pair: isinstance(pair[1], _StridedShard)):
        at, parts = target.device_mesh.get_local_rank(axis), target.device_mesh.size(axis)
        chunks = rows.chunk(parts, placement.dim)
        rows = chunks[at] if at < len(chunks) else rows.narrow(placement.dim, 0, 0)
    return rows


def _can_cut(target: DTensor) -> bool:
    """Whether `cut` knows the placements: at most one strided one beside Shard and Replicate, over all to its right."""
    strided = [(axis, p) for axis, p in enumerate(target.placements) if isinstance(p, _StridedShard)]
    known = all(isinstance(p, (Shard, Replicate, _StridedShard)) for p in target.placements)
    if not strided:
        return known
    (axis, placement), *more = strided
    right = [i for i in range(axis + 1, target.device_mesh.ndim) if target.placements[i].is_shard(placement.dim)]
    return known and not more and placement.split_factor == prod(target.device_mesh.size(i) for i in right)


def like(target: DTensor, rows: Tensor) -> DTensor:
    """Local rows as a DTensor like the target."""
    # Not from_local: on a device's mesh it would move rows that are in host memory.
    meta = TensorMeta(target.shape, target.stride(), rows.dtype)
    return as_dtensor(rows, DTensorSpec(target.device_mesh, target.placements, tensor_meta=meta))


def _plain_misfit(key: str, target: Tensor, value: Any, assign: bool) -> str | None:
    """What is wrong with a value for a target that isn't sharded; as nn.Module says it."""
    if not isinstance(value, Tensor) and not hasattr(value, "__torch_function__"):
        return (
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like object from checkpoint '
            f"but received {type(value)}"
        )
    if _lazy(target):
        return None
    if isinstance(value, DTensor) and not assign:
        return (
            f'While copying the parameter named "{key}", expected a plain tensor, found a DTensor; give full_tensor()'
        )
    if value.shape != target.shape and not (target.ndim == 0 and tuple(value.shape) == (1,)):
        return (
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {target.shape}."
        )
    if value.is_meta and not target.is_meta and not assign:
        return f'While copying the parameter named "{key}", the value is on the meta device, there is nothing to copy'
    return None


def match_keys(
    module: nn.Module,
    prefix: str,
    keys: Sequence[str],
    targets: dict[str, Tensor],
    missing: list[str],
    unexpected: list[str],
) -> None:
    """Compare keys with names, module by module, in the order and with the exceptions of nn.Module."""
    own = own_tensors(module)
    present = set(keys)
    for local, tensor in own.items():
        if prefix + local in present:
            targets[prefix + local] = tensor
        else:
            missing.append(prefix + local)
    for key in keys:
        first, *rest = key[len(prefix) :].split(".", 1)
        if first not in (module._modules if rest else own):
            unexpected.append(key)
    for name, child in module._modules.items():
        if child is not None:
            below = f"{prefix}{name}."
            match_keys(child, below, [k for k in keys if k.startswith(below)], targets, missing, unexpected)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and persistent buffers, by local name."""
    kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
    return {n: t for n, t in (module._parameters | kept).items() if t is not None}


@contextmanager
def at_rest(module: nn.Module, *, loading: bool = False) -> Iterator[None]:
    """Inside, the sharded parameters stand in the modules; a backward that failed is undone.

    Raises:
        RuntimeError: they don't; or ``loading``, and the model is inside a forward or backward, which goes on with the
            old values.
    """
    trees = {id(t): t for m in module.modules() if (t := m.__dict__.get("_hsdp_tree")) is not None}
    with ExitStack() as stack:
        for tree in trees.values():
            if loading and tree.running:
                raise RuntimeError("a state dict can't be loaded inside a forward or backward; load it afterwards")
            stack.enter_context(tree.own_parameters())
        for group in groups_of(module):
            for table, local, *_ in group.slots:
                if not isinstance(table.get(local), DTensor | None):
                    raise RuntimeError(
                        f"parameter {local!r} isn't a DTensor now: state dicts can't be taken or loaded after a "
                        f"sharded parameter was replaced by a plain one"
                    )
        yield


def _original(module: nn.Module) -> type[nn.Module]:
    """The module's class before `fully_shard` extended it."""
    return next(c for c in type(module).__mro__ if not hasattr(c, "hsdp_state"))


def _overrides(module: nn.Module, name: str) -> bool:
    return name in module.__dict__ or getattr(type(module), name) is not getattr(nn.Module, name)


def _lazy(tensor: Tensor) -> bool:
    check: Callable[..., Any] = is_lazy
    return bool(check(tensor))


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and those below, with the prefixes of their keys; one module under two names twice."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{prefix}{name}.")
