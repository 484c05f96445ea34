"""An optimizer's own parameters: which of them are split like the parameters that it steps, and which are whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from mindspore import Parameter, ParameterTuple, nn

from hsdp_fn import LayoutError
from hsdp_fn.checkpoint import Part, whole
from hsdp_fn.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Slots:
    """An optimizer's state by its names in a checkpoint.

    Attributes:
        split: what it keeps of each parameter (``moment1.`` and the parameter's name in the checkpoint), and where it
            is; None where this rank has no row of it.
        whole: the rest, by the optimizer's own names (``global_step``); the same on every rank.
    """

    split: dict[str, tuple[Part, Parameter | None]] = field(default_factory=dict)
    whole: dict[str, tuple[Part, Parameter]] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Part]:
        return {name: part for name, (part, _) in (*self.split.items(), *self.whole.items())}

    @property
    def held(self) -> list[tuple[str, Parameter]]:
        """What is on this rank."""
        every = (*self.split.items(), *self.whole.items())
        return [(name, value) for name, (_, value) in every if value is not None]


def optimizer_slots(optimizer: nn.Optimizer, params: Mapping[str, Parameter], parts: Mapping[str, Part]) -> Slots:
    """What an optimizer keeps. Does not communicate.

    Args:
        optimizer: built over ``params``.
        params: this rank's rows by name in the layout.
        parts: of all trainable parameters, also those of which this rank has no row.

    Raises:
        LayoutError: the optimizer has other parameters, or state that isn't of its parameters' shape (row and column
            sums, say), of which nobody can tell how it is split.
    """
    if set(params) != (mine := rows_to_step(parts)):
        raise LayoutError(
            f"checkpoint: the optimizer's parameters are {sorted(params)}, this rank's trainable ones are "
            f"{sorted(mine)}; build it over shard_parameters(state)"
        )
    names = {id(param): name for name, param in params.items()}
    stepped = list(optimizer.parameters)
    if {id(param) for param in stepped} != set(names):
        raise LayoutError("checkpoint: the optimizer must be built over exactly this rank's rows of the parameters")
    slots = Slots()
    seen = set(names)
    for prefix, values in _per_parameter(optimizer):
        held = {names[id(param)]: value for param, value in zip(stepped, values, strict=True)}
        for name, value in held.items():
            if tuple(value.shape) != parts[name].sizes:
                raise LayoutError(
                    f"checkpoint: {value.name!r} of {type(optimizer).__name__} has shape {tuple(value.shape)}, the "
                    f"rows of {name!r} have {parts[name].sizes}; only state of a parameter's own shape can be saved"
                )
        dtype = dtype_name(values[0].dtype)
        for name, part in parts.items():
            value = held.get(name)
            kind = dtype if value is None else dtype_name(value.dtype)
            writes = part.writes and value is not None
            slots.split[prefix + part.name] = (
                Part(prefix + part.name, kind, part.shape, part.offsets, part.sizes, writes),
                value,
            )
        seen |= {id(value) for value in values}
    for value in optimizer.get_parameters():
        if id(value) not in seen:
            if value.name in slots.parts:
                raise LayoutError(f"checkpoint: two parameters of {type(optimizer).__name__} are called {value.name!r}")
            slots.whole[value.name] = (whole(value.name, dtype_name(value.dtype), tuple(value.shape)), value)
    return slots


def rows_to_step(parts: Mapping[str, Part]) -> set[str]:
    """Names of the parameters of which this rank has a row, so that its optimizer has them."""
    return {name for name, part in parts.items() if prod(part.sizes)}


def _per_parameter(optimizer: nn.Optimizer) -> list[tuple[str, ParameterTuple]]:
    """What the optimizer keeps one of for each parameter, with what stands before the parameters' names in it."""
    stepped = optimizer.parameters
    found = []
    for values in vars(optimizer).values():
        if not isinstance(values, ParameterTuple) or len(values) != len(stepped) or values[0] is stepped[0]:
            continue
        if all(value.name.endswith(param.name) for value, param in zip(values, stepped, strict=True)):
            found.append((values[0].name.removesuffix(stepped[0].name), values))
    return found
