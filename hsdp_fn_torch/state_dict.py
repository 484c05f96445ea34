"""Model and optimizer state dicts: sharded or whole, out of a model and back in, all or nothing.

Getting delegates to ``torch.distributed.checkpoint.state_dict``. Loading converts every value to a DTensor like its
target and then runs the module's ordinary ``load_state_dict``, so that hooks, overrides and extra state behave as
always. What can be checked by names and shapes is checked before. Where the modules' own code has a say (load hooks, an
overridden ``_load_from_state_dict``), the tensors are kept aside and put back if it fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from hsdp_fn import LayoutError, RankMismatchError

Agree = Callable[[Exception | None, Iterable[str]], None]
_ASSIGN = "assign_to_params_buffers"  # how nn.Module tells modules of assign=True


def get_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """The model's parameters and persistent buffers by their names without wrappers.

    Args:
        model: any module, sharded itself or with sharded modules below it.
        options: None gives DTensors that share the masters' memory. ``cpu_offload``: copies of the shards in host
            memory. ``full_state_dict``: whole tensors on every rank (those that aren't split may share memory with the
            model). Both: rank 0 has whole tensors in host memory, other ranks get ``{}``. ``ignore_frozen_params``:
            without parameters that don't require gradients.

    Communicates with ``full_state_dict`` only: one all-gather for each split parameter. Every rank must call it then.

    Raises:
        ValueError: ``broadcast_from_rank0`` without ``full_state_dict``.
    """
    with _at_rest(model):
        return _get_model(model, options)


def _get_model(model: nn.Module, options: StateDictOptions | None) -> dict[str, Any]:
    found = cast("dict[str, Any]", dcp.get_model_state_dict(model, options=options))
    if options is not None and options.ignore_frozen_params:
        # Torch leaves out only the first name of a tied one.
        for name, param in model.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                found.pop(_plain_name(model, name), None)
    return found


def set_model_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """Load what `get_model_state_dict` gave; on all ranks or on none.

    Args:
        model: as in `get_model_state_dict`.
        state_dict: values as in `load_into`. Not changed. With ``full_state_dict`` all tensors are whole and every rank
            passes the same, unless ``broadcast_from_rank0``: then only rank 0's are looked at.
        options: ``strict``, ``full_state_dict`` and ``broadcast_from_rank0`` count. None is strict.

    Communicates one short message a rank, and one broadcast a tensor for ``broadcast_from_rank0``. Every rank of the
    model's mesh (of the default group, for the broadcast) must call it.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict`` does.

    Raises:
        ValueError: ``broadcast_from_rank0`` without ``full_state_dict``; otherwise see `load_into`.
        RankMismatchError: on the ranks whose own state dict is fine, if that of another isn't, or has other keys.
        The model is unchanged then, on every rank.
    """
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("full_state_dict must be True when broadcast_from_rank0 is True")
    with _at_rest(model):
        load = _Load(model, assign=False, full=options.full_state_dict, strict=options.strict, agree=_agreement(model))
        if options.broadcast_from_rank0:
            state_dict = _from_rank0(load, state_dict)
        return cast(_IncompatibleKeys, load.run(_with_wrappers(model, state_dict)))


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Torch's function of that name: optimizer states by the parameters' names. See `get_model_state_dict`.

    An optimizer that hasn't stepped yet takes a step without effect first, so call it after ``step`` or before the
    first backward. Communicates with ``full_state_dict`` only.
    """
    with _at_rest(model):
        return cast("dict[str, Any]", dcp.get_optimizer_state_dict(model, optimizers, options=options))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Torch's function of that name. Communicates with ``full_state_dict``.

    Raises:
        RuntimeError: states are missing; the optimizer's own errors.
    """
    with _at_rest(model):
        dcp.set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)


def load_into(
    module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True, assign: bool = False
) -> _IncompatibleKeys:
    """``load_state_dict`` of a module with sharded parameters, at or below it.

    For a sharded target a value may be a DTensor (with another placement it is redistributed), this rank's shard, or
    the whole tensor, of which this rank takes its rows. For anything else the rules are ``nn.Module``'s.

    Parameters keep their identity and memory, also where several names share one; those on the meta device get
    memory first. With ``assign`` the values take the place of the parameters, in the parameters' dtype; shards of
    whole tensors are copied first.

    Runs the original ``load_state_dict`` of the module's class. Doesn't communicate, except to redistribute.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict`` does.

    Raises:
        RuntimeError: keys are missing or unexpected and ``strict``; or a target that isn't sharded gets the wrong
            shape; in torch's words, all of them in one error. Or it is called inside a forward.
        LayoutError (a ValueError): naming each parameter, the shape, mesh or placement found, and what is expected.
        Tensors are unchanged then; so they are if a hook or an override of the module raises.
    """
    with _at_rest(module):
        return cast(_IncompatibleKeys, _Load(module, assign=assign, strict=strict).run(state_dict))


# ------------------------------------------------------------------------------------------------------------ loading


def _alone(problem: Exception | None, keys: Iterable[str]) -> None:
    if problem is not None:
        raise problem


@dataclass
class _Load:
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
    agree: Agree = _alone
    places: dict[int, tuple[DTensor, list[tuple[dict[str, Any], str]]]] = field(default_factory=dict)
    homes: dict[int, torch.device] = field(default_factory=dict)

    def run(self, state_dict: Mapping[str, Any]) -> Any:
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
        for group in _groups(self.module):
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
        _match(self.module, "", list(values), targets, missing, unexpected)
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
            if any(type(p) not in (Shard, Replicate) for p in target.placements) and found != mine:
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
            rows = _cut(target, rows)
            if self.assign:
                rows = rows.clone(memory_format=torch.contiguous_format)
        if self.assign:
            rows = rows.to(rows.device if rows.is_meta else self.home(target), target.dtype)
        return _like(target, rows)

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
                for prefix, m in _walk(self.module):
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


def _cut(target: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, a view."""
    rows: Tensor = whole.reshape(target.shape)
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            at, parts = target.device_mesh.get_local_rank(axis), target.device_mesh.size(axis)
            chunks = rows.chunk(parts, placement.dim)
            rows = chunks[at] if at < len(chunks) else rows.narrow(placement.dim, 0, 0)
    return rows


def _like(target: DTensor, rows: Tensor) -> DTensor:
    # Not from_local: on a device's mesh it would move rows that are in host memory.
    meta = TensorMeta(target.shape, target.stride(), rows.dtype)
    make: Callable[..., DTensor] = DTensor
    return make(rows, DTensorSpec(target.device_mesh, target.placements, tensor_meta=meta), requires_grad=False)


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


def _match(
    module: nn.Module,
    prefix: str,
    keys: Sequence[str],
    targets: dict[str, Tensor],
    missing: list[str],
    unexpected: list[str],
) -> None:
    """Compare keys with names, module by module, in the order and with the exceptions of nn.Module."""
    own = _own_tensors(module)
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
            _match(child, below, [k for k in keys if k.startswith(below)], targets, missing, unexpected)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
    return {n: t for n, t in (module._parameters | kept).items() if t is not None}


# ------------------------------------------------------------------------------------------------------- all the ranks


def _agreement(model: nn.Module) -> Agree:
    """Among the ranks of the first sharded module's mesh; without one, each rank is on its own."""
    group = next((g for g in _groups(model) if g.layout is not None), None)
    if group is None:
        return _alone

    def agree(problem: Exception | None, keys: Iterable[str]) -> None:
        ok = sha256("\n".join(sorted(keys)).encode()).hexdigest()
        mine = f"!{type(problem).__name__}: {problem}" if problem is not None else ok
        answers = group.backend.exchange(group.layout.mesh, mine)
        if problem is not None:
            raise problem
        for rank, answer in zip(group.layout.mesh.ranks, answers, strict=True):
            if answer.startswith("!"):
                raise RankMismatchError(f"nothing was loaded on any rank, as rank {rank} met {answer[1:]}")
            if answer != ok:
                raise RankMismatchError(f"nothing was loaded on any rank, as rank {rank} has other keys than this one")

    return agree


@dataclass(frozen=True)
class _Described:
    """A tensor of rank 0."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _from_rank0(load: _Load, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Rank 0's values, on every rank: of sharded parameters the local shard only, one tensor at a time."""
    me = dist.get_rank()
    told: list[Any] = [None]
    if me == 0 and not isinstance(state_dict, Mapping):
        told = [f"expected rank 0's state dict to be dict-like, found {type(state_dict).__name__}"]
    elif me == 0:
        bad = [key for key, value in state_dict.items() if isinstance(value, DTensor)]
        if bad:
            told = [f"broadcast_from_rank0 takes whole tensors, rank 0 has DTensors for {bad}"]
        else:
            told = [{k: _describe(v) for k, v in state_dict.items()}]
    dist.broadcast_object_list(told, src=0)
    (described,) = told
    if isinstance(described, str):
        raise LayoutError(described)
    stand_ins = {
        key: torch.empty(d.shape, dtype=d.dtype, device="meta") if isinstance(d, _Described) else d
        for key, d in described.items()
    }
    values: dict[str, Any] = {}
    targets: dict[str, Tensor] = {}
    custom = load.custom()
    _match(load.module, "", list(_with_wrappers(load.module, stand_ins)), targets, [], [])
    by_name = {_plain_name(load.module, key): target for key, target in targets.items()}
    if not custom:
        dry = _Load(load.module, assign=True, strict=load.strict, full=True)
        dry.check(_with_wrappers(load.module, stand_ins))
    device = _device(load.module)
    for key, d in described.items():
        if not isinstance(d, _Described):
            values[key] = d
            continue
        whole = state_dict[key].detach().to(device) if me == 0 else torch.empty(d.shape, dtype=d.dtype, device=device)
        whole = whole.contiguous()
        dist.broadcast(whole, src=0)
        target = by_name.get(key)
        if isinstance(target, DTensor) and not custom:
            values[key] = _like(target, _cut(target, whole).clone(memory_format=torch.contiguous_format))
        else:
            values[key] = whole
    return values


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Described(tuple(value.shape), value.dtype) if value.ndim else value.detach().cpu()


def _device(module: nn.Module) -> torch.device:
    """What the default group is known to communicate from."""
    for param in module.parameters():
        return torch.device(param.device_mesh.device_type) if isinstance(param, DTensor) else param.device
    return torch.device("cpu")


# ------------------------------------------------------------------------------------------------------------- modules


@contextmanager
def _at_rest(module: nn.Module) -> Iterator[None]:
    """Inside, the sharded parameters stand in the modules; a backward that failed is undone.

    Raises:
        RuntimeError: they don't, because the model is inside a forward or backward.
    """
    trees = {id(t): t for m in module.modules() if (t := m.__dict__.get("_hsdp_tree")) is not None}
    with ExitStack() as stack:
        for tree in trees.values():
            if (own := getattr(tree, "own_parameters", None)) is not None:
                stack.enter_context(own())
            else:
                tree.undo_failed_backward()
        for group in _groups(module):
            for table, local, *_ in group.slots:
                if not isinstance(table.get(local), DTensor | None):
                    raise RuntimeError(
                        f"parameter {local!r} isn't a DTensor now: state dicts can't be taken or loaded inside a "
                        f"forward or backward, nor after a sharded parameter was replaced by a plain one"
                    )
        yield


def _groups(module: nn.Module) -> list[Any]:
    found = {id(g): g for m in module.modules() if (g := m.__dict__.get("_hsdp_group")) is not None}
    return list(found.values())


def _original(module: nn.Module) -> type[nn.Module]:
    """The module's class before `fully_shard` extended it."""
    return next(c for c in type(module).__mro__ if not hasattr(c, "hsdp_state"))


def _overrides(module: nn.Module, name: str) -> bool:
    return name in module.__dict__ or getattr(type(module), name) is not getattr(nn.Module, name)


def _lazy(tensor: Tensor) -> bool:
    check: Callable[..., Any] = is_lazy
    return bool(check(tensor))


def _walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def _plain_name(model: nn.Module, name: str) -> str:
    """The name without what DDP, torch.compile and checkpoint wrappers have put into it."""
    (found,) = dcp._get_fqns(model, name)
    return found


def _with_wrappers(model: nn.Module, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with the names that the model's own load_state_dict looks for."""
    renamed = {}
    for prefix, m in _walk(model):
        for local in _own_tensors(m):
            inner = dcp._get_fqns(model, prefix + local, skip_ddp_prefix=False, skip_compiler_prefix=False)
            renamed[_plain_name(model, prefix + local)] = next(iter(inner))
    if all(plain == full for plain, full in renamed.items()):
        return values
    found = OrderedDict({renamed.get(key, key): value for key, value in values.items()})
    if (metadata := getattr(values, "_metadata", None)) is not None:
        found._metadata = metadata  # type: ignore[attr-defined]
    return found
