"""Where a model's modules keep the parameters of each unit, and how a frame gets between the modules' calls.

While a frame runs, calls of unit modules go through it, and full parameters stand in the modules' parameter tables.
Outside a frame the model is as the user made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hsdp_fn import ROOT, Layout, LayoutError, PhaseError

from .compiling import not_traced
from .dtensor import local_of

if TYPE_CHECKING:
    from .frame import Frame

_BINDINGS: WeakKeyDictionary[nn.Module, Binding] = WeakKeyDictionary()


def binding_of(model: nn.Module, layout: Layout) -> Binding:
    """The model's binding to a layout, made on first use.

    Raises:
        LayoutError: the layout names a parameter or a unit that the model doesn't have.
    """
    found = _BINDINGS.get(model)
    if found is None or found.layout != layout or not found.fits(model):
        found = _BINDINGS[model] = Binding(model, layout)
    return found


#: Where a parameter stands: the parameter table of a module, the local name, the parameter's index in its unit.
Slot = tuple[dict[str, Any], str, int]


class Tables:
    """Where modules keep the parameters of each unit.

    Args:
        slots: for each unit its slots, one for every name of every parameter.
        modules: those that own the slots.
    """

    def __init__(self, slots: Sequence[Sequence[Slot]], modules: Iterable[nn.Module]) -> None:
        self._slots = slots
        recurrent = [m for m in modules if isinstance(m, nn.RNNBase)]
        tables = [{id(table) for table, _, _ in unit} for unit in slots]
        self._recurrent = [[m for m in recurrent if id(m._parameters) in unit] for unit in tables]
        self._own: list[list[Any]] = []  # what stands there outside a frame
        self._installed = [False] * len(slots)
        self._left: dict[int, list[int]] = {}  # versions of full parameters that stand there while nobody runs

    def remember(self) -> None:
        """Note what stands there now, for `uninstall` to put back."""
        self._own = [self.standing(index) for index in range(len(self._slots))]

    def install(self, index: int, tensors: Sequence[Tensor] | dict[int, Tensor]) -> None:
        """Put a unit's full parameters where its modules look for them."""
        self._installed[index] = True
        for table, name, at in self._slots[index]:
            table[name] = tensors[at]

    def uninstall(self, index: int) -> None:
        """Put back what stood there."""
        if self._installed[index]:
            self._installed[index] = False
            self._left.pop(index, None)
            for (table, name, _), own in zip(self._slots[index], self._own[index], strict=True):
                table[name] = own
            if self._recurrent[index]:
                refresh_flat_weights(self._recurrent[index])

    def standing(self, index: int) -> list[Any]:
        """For each slot of a unit what stands there outside a frame."""
        if self._installed[index]:
            return self._own[index]
        return [table[name] for table, name, _ in self._slots[index]]

    def own_tensors(self, index: int) -> dict[int, Any]:
        """What stands there outside a frame, by the parameters' places in the unit."""
        return {at: own for (_, _, at), own in zip(self._slots[index], self.standing(index), strict=True)}

    def leave(self, index: int) -> None:
        """A unit's full parameters stay where they are while nobody runs."""
        self._left[index] = self._versions(index)

    def edited(self) -> int | None:
        """A unit whose full parameters were left and have been edited since: the edit would be lost with them."""
        for index, left in self._left.items():
            if left != self._versions(index):
                return index
        return None

    def _versions(self, index: int) -> list[int]:
        """An operator on a DTensor counts there, one on its local tensor in that."""
        tensors = [table[name] for table, name, _ in self._slots[index]]
        return [t._version + local_of(t)._version for t in tensors]

    @property
    def in_place(self) -> bool:
        """Whether full parameters stand anywhere."""
        return any(self._installed)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Inside, all that `install` has put anywhere is away. What is replaced meanwhile stays replaced."""
        inside = [[table[name] for table, name, _ in slots] if on else None for slots, on in self._state()]
        left = dict(self._left)
        self.disconnect()
        try:
            yield
        finally:
            self.remember()
            for index, tensors in enumerate(inside):
                if tensors is not None:
                    self._installed[index] = True
                    for (table, name, _), tensor in zip(self._slots[index], tensors, strict=True):
                        table[name] = tensor
            self._left = left

    def disconnect(self) -> None:
        """Put back everything: the frame has ended."""
        for index in range(len(self._slots)):
            self.uninstall(index)

    def _state(self) -> list[tuple[Sequence[Slot], bool]]:
        return list(zip(self._slots, self._installed, strict=True))


def edited_text(title: str) -> str:
    """What to say of edited full parameters."""
    return (
        f"the gathered parameters of unit {title!r} were edited in place; they are a copy of the masters, so the edit "
        f"would be lost. Edit the sharded parameters instead: those of module.parameters(), or after module.reshard()"
    )


class Binding(Tables):
    """One model's parameter tables and unit modules, looked up once."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        slots: list[list[Slot]] = []
        self._modules: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._frame: Frame | None = None
        tables = {name: (module._parameters, local) for name, module, local in _parameter_places(model)}
        for index, plan in enumerate(layout.units):
            for name, at in plan.positions.items():
                if name not in tables:
                    raise LayoutError(f"the layout has parameter {name!r}, but {type(model).__name__} doesn't")
                table, local = tables[name]
                if (shape := tuple(getattr(table[local], "shape", ()))) != plan.params[at].shape:
                    raise LayoutError(
                        f"parameter {name!r} of {type(model).__name__} has shape {shape}, but the layout was planned "
                        f"for {plan.params[at].shape}"
                    )
            slots.append([(*tables[name], at) for name, at in plan.positions.items()])
            for name in plan.modules if plan.name != ROOT else ():
                module = _submodule(model, name)
                if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                    raise LayoutError(f"unit module {name!r} ({type(module).__name__}) has no forward of its own")
                if any(module is other for other, _ in self._modules):
                    continue  # one module under two names
                self._modules.append((module, self._call(module, index, last=name == plan.modules[-1])))
        self._below = list(model.modules())[1:]  # not the model itself, whose binding would keep it alive
        super().__init__(slots, self._below)

    def fits(self, model: nn.Module) -> bool:
        """Whether the model still has the very modules that were looked up."""
        below = list(model.modules())[1:]
        return len(below) == len(self._below) and all(a is b for a, b in zip(below, self._below, strict=True))

    def connect(self, frame: Frame) -> None:
        """Send calls of unit modules through the frame."""
        if self._frame is frame:
            return
        if self._frame is not None:
            raise PhaseError("the model is running in another value_and_grad call already")
        self._frame = frame
        self.remember()
        for plan, unit, own in zip(self.layout.units, self._slots, self._own, strict=True):
            for (_, name, at), param in zip(unit, own, strict=True):
                if param is None or param.requires_grad != plan.params[at].requires_grad:
                    self._frame = None
                    raise LayoutError(
                        f"parameter {plan.params[at].name!r} ({name}) was frozen, unfrozen or removed after the layout "
                        f"was planned with requires_grad={plan.params[at].requires_grad}; plan and shard again"
                    )
        # `Module.__call__` prefers this slot, which `Module.compile` fills, to `_call_impl`: it is the one place in
        # front of the module's own hooks. Guarded by test_functional.py.
        for module, call in self._modules:
            module.__dict__["_hsdp_inner_call"] = module._compiled_call_impl
            module.__dict__["_compiled_call_impl"] = call

    def disconnect(self) -> None:
        """Leave the model as it was before `connect`."""
        self._frame = None
        for module, _ in self._modules:
            inner = module.__dict__.pop("_hsdp_inner_call")
            if inner is None:
                del module.__dict__["_compiled_call_impl"]
            else:
                module.__dict__["_compiled_call_impl"] = inner
        super().disconnect()

    def _call(self, module: nn.Module, index: int, last: bool) -> Callable[..., Any]:
        @not_traced
        def call(*args: Any, **kwargs: Any) -> Any:
            inner = module.__dict__["_hsdp_inner_call"] or module._call_impl
            assert self._frame is not None
            return self._frame.run(index, inner, args, kwargs, final=lambda: last)

        return call


def refresh_flat_weights(modules: Iterable[nn.Module]) -> None:
    """Recurrent modules keep a second list of their weights; make it follow their parameter tables."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def _parameter_places(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """``(fully qualified name, owner, local name)`` of every entry, ties included under each of their names."""
    return [
        (f"{prefix}.{local}" if prefix else local, module, local)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for local, parameter in module._parameters.items()
        if parameter is not None
    ]


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise LayoutError(f"unit module {name!r} doesn't exist in {type(model).__name__}") from error
