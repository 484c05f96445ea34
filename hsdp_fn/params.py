"""What a functional step hands to the user's function: parameters that are gathered as they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .backend import Tensor
from .layout import Layout


class Running(Protocol):
    """The frame of a functional step."""

    layout: Layout

    def bind(self, binding: Any) -> None:
        """Run the units of a model through this frame until it ends."""
        ...

    def run(self, index: int, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``call(*args, **kwargs)`` as the forward of a unit."""
        ...

    def look(self, index: int) -> Sequence[Tensor]:
        """A unit's full parameters, attached to autograd, for use by name."""
        ...

    def current(self, index: int) -> Sequence[Tensor]:
        """The full parameters of a unit that is running."""
        ...


class Params:
    """The parameters of a running `value_and_grad`, gathered as they are used. Valid inside the call only.

    Pass it to `functional_call` for a model, run a function of one unit's parameters with `run`, or index it by
    parameter name, which gathers the parameter's unit until its backward.
    """

    def __init__(self, frame: Running) -> None:
        self._frame = frame

    def run(self, unit: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(params, *args, **kwargs)`` with the unit's full parameters by name, as the unit's forward.

        Communicates: gathers the unit unless it is there, and starts gathering the next ones.

        Raises:
            UnknownUnitError: the layout has no such unit.
        """
        (index,) = self._frame.layout.select(unit)
        positions = self._frame.layout.units[index].positions

        def call(*args: Any, **kwargs: Any) -> Any:
            full = self._frame.current(index)
            return function({name: full[at] for name, at in positions.items()}, *args, **kwargs)

        return self._frame.run(index, call, args, kwargs)

    def __getitem__(self, name: str) -> Tensor:
        """The full parameter, in compute dtype, attached to autograd. Communicates like `run`."""
        for index, plan in enumerate(self._frame.layout.units):
            if name in plan.positions:
                return self._frame.look(index)[plan.positions[name]]
        raise KeyError(f"no parameter {name!r} in this layout")
