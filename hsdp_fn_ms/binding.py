"""Where a model's cells keep the parameters of each unit, and how a frame gets between the cells' calls.

While a frame runs, an instance attribute shadows each parameter of a gathered unit and the ``construct`` of each unit's
cell. Outside a frame the model is as the user made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, ParameterTuple, Tensor, nn

from hsdp_fn import ROOT, Layout, LayoutError, PhaseError

if TYPE_CHECKING:
    from .frame import Frame

#: Where a parameter stands: its cell, the local name, the parameter's index in its unit.
Slot = tuple[nn.Cell, str, int]


def binding_of(cell: nn.Cell, layout: Layout) -> Binding:
    """The model's binding to a layout, made on first use.

    Raises:
        LayoutError: the layout names a parameter or a unit that the model doesn't have.
        NotImplementedError: a cell that would lose gradients, see `require_plain`.
    """
    require_plain(cell)
    found: Binding | None = cell.__dict__.get("_hsdp_binding")
    if found is None or found.layout != layout or not found.fits(cell):
        found = cell.__dict__["_hsdp_binding"] = Binding(cell, layout)
    return found


class Tables:
    """Where a model keeps the parameters of its units.

    Args:
        slots: of each unit, the places of its parameters.
    """

    def __init__(self, slots: Sequence[Sequence[Slot]]) -> None:
        self._slots = slots
        self._installed = [False] * len(slots)

    @property
    def in_place(self) -> bool:
        """Whether full parameters stand anywhere."""
        return any(self._installed)

    def own(self) -> AbstractContextManager[None]:
        """The cells' lists of parameters have the sharded ones always: only attributes are shadowed."""
        return nullcontext()

    def install(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Put a unit's full parameters where its cells look for them."""
        self._installed[index] = True
        for owner, local, at in self._slots[index]:
            owner.__dict__[local] = tensors[at]

    def uninstall(self, index: int) -> None:
        """The cells have their own parameters back."""
        if self._installed[index]:
            self._installed[index] = False
            for owner, local, _ in self._slots[index]:
                owner.__dict__.pop(local, None)

    def disconnect(self) -> None:
        """All cells have."""
        for index in range(len(self._slots)):
            self.uninstall(index)


class Binding(Tables):
    """One model's parameters and unit cells, looked up once.

    Raises:
        LayoutError: see `binding_of`.
    """

    def __init__(self, model: nn.Cell, layout: Layout) -> None:
        self.layout = layout
        self._frame: Frame | None = None
        slots: list[list[Slot]] = []
        self._cells: list[tuple[nn.Cell, Callable[..., Any]]] = []
        places = {name: (owner, local) for name, owner, local in parameter_places(model)}
        cells = dict(named_cells(model))
        for index, plan in enumerate(layout.units):
            for name, at in plan.positions.items():
                if name not in places:
                    raise LayoutError(f"the layout has parameter {name!r}, but {type(model).__name__} doesn't")
                owner, local = places[name]
                shape = tuple(owner._params[local].shape)
                if shape not in (plan.params[at].shape, (0,)):
                    raise LayoutError(
                        f"parameter {name!r} of {type(model).__name__} has shape {shape}, but the layout was planned "
                        f"for {plan.params[at].shape}"
                    )
            slots.append([(*places[name], at) for name, at in plan.positions.items()])
            for name in plan.modules if plan.name != ROOT else ():
                if name not in cells:
                    raise LayoutError(f"unit cell {name!r} doesn't exist in {type(model).__name__}")
                cell = cells[name]
                if isinstance(cell, (nn.CellList, nn.CellDict)):
                    raise LayoutError(f"unit cell {name!r} ({type(cell).__name__}) has no construct of its own")
                if all(cell is not other for other, _ in self._cells):
                    self._cells.append((cell, self._call(cell, index, last=name == plan.modules[-1])))
        self._below = [cell for _, cell in named_cells(model)][1:]
        super().__init__(slots)

    def fits(self, model: nn.Cell) -> bool:
        """Whether the model still has the very cells that were looked up."""
        below = [cell for _, cell in named_cells(model)][1:]
        return len(below) == len(self._below) and all(a is b for a, b in zip(below, self._below, strict=True))

    def connect(self, frame: Frame) -> None:
        """Send calls of unit cells through the frame.

        Raises:
            PhaseError: the model runs in another call.
            LayoutError: a parameter was frozen, unfrozen or replaced since.
        """
        if self._frame is frame:
            return
        if self._frame is not None:
            raise PhaseError("the model is running in another value_and_grad call already")
        for plan, slots in zip(self.layout.units, self._slots, strict=True):
            for owner, local, at in slots:
                param = owner._params.get(local)
                if param is None or bool(param.requires_grad) != plan.params[at].requires_grad:
                    raise LayoutError(
                        f"parameter {plan.params[at].name!r} ({local}) was frozen, unfrozen or removed after the "
                        f"layout was planned with requires_grad={plan.params[at].requires_grad}; plan and shard again"
                    )
        self._frame = frame
        for cell, call in self._cells:
            cell.__dict__["construct"] = call

    def disconnect(self) -> None:
        """Leave the model as it was before `connect`."""
        if self._frame is None:
            return
        self._frame = None
        for cell, _ in self._cells:
            cell.__dict__.pop("construct", None)
        super().disconnect()

    def _call(self, cell: nn.Cell, index: int, *, last: bool) -> Callable[..., Any]:
        own = type(cell).construct

        def call(*args: Any, **kwargs: Any) -> Any:
            assert self._frame is not None
            return self._frame.run(index, lambda *a, **k: own(cell, *a, **k), args, kwargs, final=lambda: last)

        return call


def require_plain(model: nn.Cell) -> None:
    """Raise `NotImplementedError` for cells whose gradients wouldn't reach the state: what is recomputed in backward,
    what is compiled, and what has a ``bprop`` of its own takes parameters as constants when they are plain tensors."""
    for name, cell in named_cells(model):
        what = None
        if cell._recompute_cell is not None:
            what = "is recomputed in backward (Cell.recompute)"
        elif getattr(type(cell).construct, "__wrapped_by_jit__", False):
            what = "has a construct compiled by mindspore.jit"
        elif cell.has_bprop and any(below._params for _, below in named_cells(cell)):
            what = "has parameters and a bprop of its own"
        if what is not None:
            raise NotImplementedError(
                f"cell {name or '(root)'!r} ({type(cell).__name__}) {what}; hsdp_fn_ms can't give its gathered "
                f"parameters gradients then"
            )


def named_cells(model: nn.Cell, prefix: str = "") -> Iterator[tuple[str, nn.Cell]]:
    """The model and all cells below it by path; a cell in two places under both names."""
    yield prefix, model
    for name, cell in model._cells.items():
        if cell is not None:
            yield from named_cells(cell, f"{prefix}.{name}" if prefix else name)


def parameter_places(model: nn.Cell) -> list[tuple[str, nn.Cell, str]]:
    """``(fully qualified name, owner, local name)`` of every parameter, ties included under each of their names.

    Raises:
        LayoutError: a `ParameterTuple`, whose elements can't be replaced while the model runs.
    """
    out = []
    for prefix, cell in named_cells(model):
        require_no_tuples(prefix, cell)
        for local, param in cell._params.items():
            if isinstance(param, Parameter):
                out.append((f"{prefix}.{local}" if prefix else local, cell, local))
    return out


def require_no_tuples(path: str, cell: nn.Cell) -> None:
    """Raise `LayoutError` where a cell keeps parameters in a tuple."""
    for local, value in vars(cell).items():
        if isinstance(value, ParameterTuple):
            raise LayoutError(
                f"{type(cell).__name__} {path!r} keeps parameters in a ParameterTuple ({local}), from which a unit's "
                f"can't be taken; make each an attribute of its own"
            )
