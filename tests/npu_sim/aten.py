"""Kernels of device ``npu``: the CPU's, run on the same memory, in stream order.

An aten op that torch_npu registers for its device is replaced by a function that allocates the outputs at once (their
shapes come from the meta device) and launches the CPU's kernel on the current stream of the tensors' device, where it
runs later, as a device would do it. Views, allocation and streams stay torch_npu's own.
"""

from __future__ import annotations

import ctypes
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch._ops import OpOverload

#: Ops of torch_npu that only deal with metadata, memory and streams, beside all those that return views.
KEPT = {
    "_pin_memory",
    "as_strided_",
    "empty.memory_format",
    "empty_like",
    "empty_strided",
    "empty_with_format",
    "get_npu_format",
    "get_storage_size",
    "is_pinned",
    "is_set_to",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "resize_as_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "unsafe_empty_with_format",
}
#: Ops whose integer tensors may be on the CPU while the others are on the device.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
#: Message bytes that the simulator keeps of a failed kernel.
_MESSAGE_BYTES = 700

Kernel = Callable[..., Any]


# --------------------------------------------------------------------------------------------------------------- launch


class _Launcher:
    """Hands functions to streams. The simulator calls them back from the streams' threads."""

    def __init__(self, main: ctypes.CDLL) -> None:
        self._launch = main.npu_sim_launch
        self._launch.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._pending: dict[int, Callable[[], object]] = {}
        self._tickets = itertools.count(1)
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._entry = prototype(self._run)

    def __call__(self, name: str, device: torch.device, work: Callable[[], object]) -> None:
        """Do ``work`` on the device's current stream, after what the wheel has queued for it so far."""
        ticket = next(self._tickets)
        self._pending[ticket] = work
        handle = _handle(torch.npu.current_stream(device))
        if code := self._launch(name.encode(), self._entry, ticket, handle):
            raise RuntimeError(f"npu_sim: can't launch {name}: error {code}")

    def _run(self, ticket: int, message: int, size: int) -> int:
        try:
            self._pending.pop(ticket)()
        except BaseException:  # reported by the stream: there is no caller here
            text = traceback.format_exc().encode()[-min(size - 1, _MESSAGE_BYTES) :]
            ctypes.memmove(message, text + b"\0", len(text) + 1)
            return 1
        return 0


_launcher: _Launcher


def launch(name: str, device: torch.device, work: Callable[[], object]) -> None:
    """Call ``work`` when the device's current stream, as of now, comes to it."""
    _launcher(name, device, work)


def _handle(stream: torch.npu.Stream) -> int:
    """The simulator's stream, once what torch_npu has queued for it has been handed to the simulator. It has a queue
    for each device, and empties that of the current one; something may wait in either."""
    handle = stream.npu_stream
    if stream.device.index != torch.npu.current_device():
        with torch.npu.device(stream.device):
            handle = stream.npu_stream
    return handle


def _synchronize(device: torch.device) -> None:
    torch.npu.current_stream(device).synchronize()


# ------------------------------------------------------------------------------------------------------------ arguments


def _on_npu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to the leaves of an argument or a result; dtypes, lists and so on stay what they are."""
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _alias(tensor: Tensor) -> Tensor:
    """A CPU tensor on the device tensor's memory. It doesn't keep the memory alive: a kernel doesn't either, and that
    a block is used after it was freed is for a test to find."""
    storage = tensor.untyped_storage()
    out = torch.empty(0, dtype=tensor.dtype)
    if storage.nbytes() == 0:
        return out.as_strided(tensor.size(), tensor.stride()) if tensor.numel() == 0 else out.new_empty(tensor.size())
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return out.set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


def _for_cpu(value: Any) -> Any:
    """What the CPU's kernel gets later: the host may have changed its own tensors by then, so those are copied."""
    if _on_npu(value):
        return _alias(value)
    if isinstance(value, Tensor):
        return value.clone()
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def _for_meta(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, Tensor) and (value.device.type == "npu" or value.dim() > 0):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "npu" else value


def _device_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device of the call's tensors, or the one that it asks for.

    Raises:
        RuntimeError: they are on several devices, as real kernels say.
    """
    tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "npu"}
    others = {tensor.device for tensor in tensors if tensor.device.type != "npu" and tensor.dim() > 0}
    if len(devices) > 1 or (others and op._schema.name.removeprefix("aten::") not in INDEXING):
        found = ", ".join(sorted(str(device) for device in devices | others))
        raise RuntimeError(f"{op}: expected all tensors to be on the same device, found {found}")
    if devices:
        return devices.pop()
    wanted = kwargs.get("device")
    if wanted is None or wanted.index is None:
        return torch.device("npu", torch.npu.current_device())
    return torch.device(wanted)


# ------------------------------------------------------------------------------------------------------ generic kernels


def _generic(op: OpOverload) -> Kernel:
    """A kernel that runs the CPU's, on aliases of the arguments.

    Arguments that the schema marks as written are written in place; an ``out`` of another shape is resized first. New
    outputs get shape, strides and dtype from the meta device. Where that can't tell (the shape depends on the data, or
    the arguments are wrong, which is to be raised here), the host waits for the stream and computes at once.
    """
    schema = op._schema
    written = [(i, a.name) for i, a in enumerate(schema.arguments) if _writes(a)]
    outs = [a.name for a in schema.arguments if a.is_out]
    returned = [_written_argument(schema, result) for result in schema.returns]
    title = op.name().removeprefix("aten::")
    seeded = any(argument.name == "generator" for argument in schema.arguments)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        device = _device_of(op, args, kwargs)
        if seeded:
            kwargs = {**kwargs, "generator": _host_generator(kwargs.get("generator"), device)}
        given = {name: args[i] if i < len(args) else kwargs[name] for i, name in written}
        planned = _plan(op, args, kwargs)
        if planned is None:
            _synchronize(device)
            substitutes = {name: _map(given[name], lambda out: torch.empty(0, dtype=out.dtype)) for name in outs}
            found = _results(op, op(*_map(args, _for_cpu), **{**_map(kwargs, _for_cpu), **substitutes}))
            for out, value in zip(_leaves([given[name] for name in outs]), _leaves(substitutes), strict=True):
                out.resize_(value.shape).copy_(value)
            new = [_map(value, lambda leaf: _on(device, leaf)) for value in _new(found, returned)]
            return _answer(returned, given, new)

        for shape, name in zip(planned, returned, strict=True):
            if name in outs and given[name].shape != shape.shape:
                given[name].resize_(shape.shape)
        new = [_map(shape, lambda leaf: _like(leaf, device)) for shape in _new(planned, returned)]
        cpu_args, cpu_kwargs, targets = _map(args, _for_cpu), _map(kwargs, _for_cpu), _map(new, _for_cpu)

        def work() -> None:
            found = _results(op, op(*cpu_args, **cpu_kwargs))
            for target, value in zip(_leaves(targets), _leaves(_new(found, returned)), strict=True):
                if target is not None:
                    target.copy_(value)

        launch(title, device, work)
        return _answer(returned, given, new)

    return kernel


def _plan(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The op's results as meta tensors; None if they can't be told without the data."""
    try:
        found = _results(op, op(*_map(args, _for_meta), **_map(kwargs, _for_meta)))
    except Exception:
        return None
    known = all(leaf is None or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in _leaves(found))
    return found if known else None


def _results(op: OpOverload, value: Any) -> tuple[Any, ...]:
    """What an op returned, one item for each result of its schema."""
    count = len(op._schema.returns)
    return (value,) if count == 1 else tuple(value) if count else ()


def _new(results: Iterable[Any], returned: list[str | None]) -> list[Any]:
    """Those of the results that aren't arguments."""
    return [value for value, name in zip(results, returned, strict=True) if name is None]


def _answer(returned: list[str | None], given: dict[str, Any], new: list[Any]) -> Any:
    """What the kernel returns: written arguments and new tensors, in the schema's order."""
    following = iter(new)
    answer = [next(following) if name is None else given[name] for name in returned]
    return answer[0] if len(answer) == 1 else tuple(answer) if answer else None


def _on(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _written_argument(schema: Any, result: Any) -> str | None:
    """The name of the argument that a result of the schema is; None for a new tensor."""
    if result.alias_info is None:
        return None
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.before_set & result.alias_info.before_set:
            return str(argument.name)
    return None


def _like(meta: Tensor | None, device: torch.device) -> Tensor | None:
    if meta is None:
        return None
    return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device)


def _torchs_own(op: OpOverload, key: str) -> Kernel:
    """What torch does for another key, for ops where torch_npu has replaced it: compose other ops, or its autograd."""
    own = torch.library.get_kernel(op, key)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return own.call_boxed(keys, *args, **kwargs)

    return kernel


def _missing(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"npu_sim: {name} isn't simulated")

    return kernel


# --------------------------------------------------------------------------------------------------------------- random


def _host_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A CPU generator whose seed follows from the NPU generator's seed and offset; the offset moves on, as it does with
    each random kernel. So seeding, saving and restoring the state of an NPU's generator have their usual effects."""
    index = torch.npu.current_device() if device.index is None else device.index
    own = generator if generator is not None else torch.npu.default_generators[index]
    offset = own.get_offset()
    own.set_offset(offset + 4)
    return torch.Generator().manual_seed(hash((own.initial_seed(), offset)) & 0x7FFF_FFFF_FFFF_FFFF)


# ---------------------------------------------------------------------------------------------------------- own kernels


def _copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    if _on_npu(self) and _on_npu(src):
        _copy_on_device(self, src)
    elif _on_npu(self):  # a pinned source is read later, whatever the host does with it in between
        target, source = _alias(self), src if non_blocking and src.is_pinned() else src.clone()
        launch("copy_", self.device, lambda: _assign(target, source))
    else:
        target, source = self.detach(), _alias(src)
        launch("copy_", src.device, lambda: _assign(target, source))
        if not (non_blocking and self.is_pinned()):
            _synchronize(src.device)
    return self


def _assign(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _copy_on_device(self: Tensor, src: Tensor) -> None:
    target, source = _alias(self), _alias(src)
    if self.device == src.device:
        launch("copy_", src.device, lambda: _assign(target, source))
        return
    # Between devices, the copy runs on the source's stream, between two points of the target's. Each step is handed to
    # the simulator before the next one, as each device has a queue of its own.
    reader, writer = torch.npu.current_stream(src.device), torch.npu.current_stream(self.device)
    before = writer.record_event()
    _handle(writer)
    reader.wait_event(before)
    launch("copy_", src.device, lambda: _assign(target, source))
    after = reader.record_event()
    _handle(reader)
    writer.wait_event(after)
    _handle(writer)


def _copy_from_and_resize(self: Tensor, dst: Tensor) -> Tensor:
    return dst.resize_(self.shape).copy_(self)


def _to_copy(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten._to_copy.default._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _local_scalar_dense(self: Tensor) -> Any:
    _synchronize(self.device)
    return _alias(self).item()


def _cast(self: Tensor, dtype: torch.dtype) -> Tensor:
    return _copy_(torch.empty_like(self, dtype=dtype), self)


def _native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _randperm(n: int, **kwargs: Any) -> Tensor:
    return torch.ops.aten.randperm.generator(n, generator=None, **kwargs)


def _native_layer_norm_backward(
    grad_out: Tensor, input: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, *rest: Any
) -> Any:
    """The meta device gives the statistics in fp32, the CPU's kernel wants them as its forward gives them."""
    dtype = input.dtype if weight is None or weight.dtype == input.dtype else torch.float32
    op = _generic(torch.ops.aten.native_layer_norm_backward.default)
    return op(grad_out, input, shape, mean.to(dtype), rstd.to(dtype), weight, *rest)


OWN: dict[str, Kernel] = {
    "_copy_from_and_resize": _copy_from_and_resize,
    "_fused_sdp_choice": lambda *args, **kwargs: 0,  # attention by its formula, of other ops
    "_local_scalar_dense": _local_scalar_dense,
    "_to_copy": _to_copy,
    "copy_": _copy_,
    "native_dropout": _native_dropout,
    "native_layer_norm_backward": _native_layer_norm_backward,
    "randperm": _randperm,
}
OWN_NPU: dict[str, Kernel] = {"_npu_dtype_cast": _cast, "npu_dtype_cast": _cast}


# -------------------------------------------------------------------------------------------------------------- install

_installed: list[torch.library.Library] = []  # a library's kernels go when it does


def install(main: ctypes.CDLL) -> None:
    """Replace torch_npu's kernels and its autograd formulas, for the rest of the process."""
    global _launcher
    _launcher = _Launcher(main)
    aten, npu = torch.library.Library("aten", "IMPL"), torch.library.Library("npu", "IMPL")
    _installed.extend([aten, npu])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*kernel")  # that kernels are overridden is the point
        for name, op in _registered("aten", "AutogradPrivateUse1"):
            own = _torchs_own(op, "AutogradCPU")
            aten.impl(name, own, "AutogradPrivateUse1", with_keyset=True, allow_override=True)
        for name, op in _registered("aten", "PrivateUse1"):
            if name not in KEPT:
                _install_aten(aten, name, op)
        for name, op in _registered("npu", "PrivateUse1"):
            npu.impl(name, OWN_NPU.get(name) or _missing(op.name()), "PrivateUse1", allow_override=True)


def _registered(namespace: str, key: str) -> Iterator[tuple[str, OpOverload]]:
    """The ops of a namespace that have a kernel of this key; not those without a schema, which nobody can call."""
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        found, name = qualified.split("::")
        packet, _, overload = name.partition(".")
        if found == namespace and (ops := getattr(getattr(torch.ops, found), packet, None)) is not None:
            yield name, getattr(ops, overload or "default")


def _install_aten(aten: torch.library.Library, name: str, op: OpOverload) -> None:
    views = any(a.alias_info is not None and not _writes(a) for a in op._schema.arguments)
    if name in OWN:
        aten.impl(name, OWN[name], "PrivateUse1", allow_override=True)
    elif _has_kernel(op, "CompositeImplicitAutograd") and not _has_kernel(op, "CPU"):
        own = _torchs_own(op, "CPU")  # which is to compose other ops
        aten.impl(name, own, "PrivateUse1", with_keyset=True, allow_override=True)
    elif not views:
        known = _has_kernel(op, "CPU") or _has_kernel(op, "CompositeExplicitAutograd")
        aten.impl(name, _generic(op) if known else _missing(op.name()), "PrivateUse1", allow_override=True)


def _has_kernel(op: OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


assert torch_npu.__version__.startswith("2.13."), "written for the ops of torch-npu 2.13"
