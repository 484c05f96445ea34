"""Model and optimizer state dicts: sharded or whole, out of a model and back in, all or nothing.

Getting delegates to ``torch.distributed.checkpoint.state_dict``. Loading converts every value to a DTensor like its
target and then runs the module's ordinary ``load_state_dict``, so that hooks, overrides and extra state behave as
always. What can be checked by names and shapes is checked before. Where the modules' own code has a say (load hooks, an
overridden ``_load_from_state_dict``), the tensors are kept aside and put back if it fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from hsdp_fn import LayoutError, RankMismatchError

from .group import groups_of
from .loading import Agree, Load, alone, at_rest, cut, like, match_keys, own_tensors, walk


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
    with at_rest(model):
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
    with at_rest(model, loading=True):
        load = Load(model, assign=False, full=options.full_state_dict, strict=options.strict, agree=_agreement(model))
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
    with at_rest(model):
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
    with at_rest(model):
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
            shape; in torch's words, all of them in one error. Or it is called inside a forward or backward.
        LayoutError (a ValueError): naming each parameter, the shape, mesh or placement found, and what is expected.
        Tensors are unchanged then; so they are if a hook or an override of the module raises.
    """
    with at_rest(module, loading=True):
        return cast(_IncompatibleKeys, Load(module, assign=assign, strict=strict).run(state_dict))


def _agreement(model: nn.Module) -> Agree:
    """Among the ranks of the widest mesh of a sharded module; without one, each rank is on its own."""
    sharded = [g for g in groups_of(model) if g.layout is not None]
    if not sharded:
        return alone
    widest = max(sharded, key=lambda g: g.data.spec.data_parallel_size)
    backend = widest.backend

    def agree(problem: Exception | None, keys: Iterable[str]) -> None:
        ok = sha256("\n".join(sorted(keys)).encode()).hexdigest()
        mine = f"!{type(problem).__name__}: {problem}" if problem is not None else ok
        answers = backend.exchange(mine)
        if problem is not None:
            raise problem
        for rank, answer in answers.items():
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


def _from_rank0(load: Load, state_dict: Mapping[str, Any]) -> dict[str, Any]:
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
    match_keys(load.module, "", list(_with_wrappers(load.module, stand_ins)), targets, [], [])
    by_name = {_plain_name(load.module, key): target for key, target in targets.items()}
    if not custom:
        dry = Load(load.module, assign=True, strict=load.strict, full=True)
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
            values[key] = like(target, cut(target, whole).clone(memory_format=torch.contiguous_format))
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


def _plain_name(model: nn.Module, name: str) -> str:
    """The name without what DDP, torch.compile and checkpoint wrappers have put into it."""
    (found,) = dcp._get_fqns(model, name)
    return found


def _with_wrappers(model: nn.Module, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with the names that the model's own load_state_dict looks for."""
    renamed = {}
    for prefix, m in walk(model):
        for local in own_tensors(m):
            inner = dcp._get_fqns(model, prefix + local, skip_ddp_prefix=False, skip_compiler_prefix=False)
            renamed[_plain_name(model, prefix + local)] = next(iter(inner))
    if all(plain == full for plain, full in renamed.items()):
        return values
    found = OrderedDict({renamed.get(key, key): value for key, value in values.items()})
    if (metadata := getattr(values, "_metadata", None)) is not None:
        found._metadata = metadata  # type: ignore[attr-defined]
    return found
