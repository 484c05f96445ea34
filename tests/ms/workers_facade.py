"""What the tests of MindSpore's facade share: both ways to differentiate, and a model beside its plain twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

import hsdp_fn_ms as hm
from hsdp_fn_ms.binding import parameter_places
from tests.ms.sizes import OUT, WIDTH
from tests.ms.workers import Single, array, close, local_rows, squares

#: `mindspore.value_and_grad`, and ``loss.backward()``.
HOWS = ("function", "backward")


class Uneven(nn.Cell):
    """Sizes 3, 5 and 7: of the first two 4 ranks don't all have rows, nor 2 ranks equally many."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(WIDTH, 3)
        self.layers = nn.CellList([nn.Dense(3, 7), nn.Dense(7, 5)])
        self.last = nn.Dense(5, OUT)

    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return self.last(x)


def sharded(cell: nn.Cell, mesh: hm.DeviceMesh, **options: Any) -> Any:
    """The cell with each layer as a unit, and the rest as the root's."""
    for layer in cell.layers:
        hm.fully_shard(layer, mesh=mesh, **options)
    return hm.fully_shard(cell, mesh=mesh, **options)


def parameters(cell: nn.Cell) -> dict[str, Parameter]:
    """By fully qualified name, tied ones under their first."""
    out: dict[str, Parameter] = {}
    for name, owner, local in parameter_places(cell):
        if all(owner._params[local] is not p for p in out.values()):
            out[name] = owner._params[local]
    return out


def trainable(cell: nn.Cell) -> dict[str, Parameter]:
    """Those that get gradients, and of which this rank has rows."""
    return {name: p for name, p in parameters(cell).items() if p.requires_grad and p.size}


def differentiate(how: str, cell: nn.Cell, forward: Callable[..., Tensor], *args: Any) -> tuple[Tensor, dict[str, Any]]:
    """The value of ``forward``, and the gradients of `trainable` as ``how`` gives them: with ``backward`` these are
    added to what ``.grad`` was."""
    params = trainable(cell)
    if how == "function":
        value, found = ms.value_and_grad(forward, None, weights=ParameterTuple(list(params.values())))(*args)
    else:
        hm.enable_mindspore_backward_compat()
        value = forward(*args)
        value.backward()
        found = [p.grad for p in params.values()]
    return value, dict(zip(params, found, strict=True))


def rows(cell: Any, full: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """This rank's rows of full arrays; those that are empty left out."""
    return {name: value for name, value in local_rows(cell.hsdp_state, full).items() if value.size}


def full_values(cell: nn.Cell) -> dict[str, np.ndarray]:
    """Full values by every name. Communicates."""
    return {name: array(value) for name, value in hm.get_model_state_dict(cell).items()}


def same_values(cell: nn.Cell, single: Single, rtol: float = 1e-6) -> None:
    """The sharded cell has its twin's parameters. Communicates."""
    found, expected = full_values(cell), {name: array(p) for name, p in single.params.items()}
    close({name: found[name] for name in expected}, expected, rtol)


def exact(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    """Equal names and values; None counts as a value."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(array(found[name]), value, err_msg=name)


class Trainer:
    """A cell of `fully_shard` in training with MindSpore's SGD, beside the same model in plain MindSpore; the ways to
    differentiate take turns."""

    def __init__(
        self, cell: Any, single: Single, rank: int, hows: Sequence[str] = HOWS, loss: Callable[..., Tensor] = squares
    ) -> None:
        self.cell, self.single, self.rank, self.loss, self._turns = cell, single, rank, loss, cycle(hows)
        if "backward" in hows:
            hm.enable_mindspore_backward_compat()
        self.optimizer = nn.SGD(cell.trainable_params(), learning_rate=0.1, momentum=0.9)
        self._function = ms.value_and_grad(self.forward, None, weights=self.optimizer.parameters)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.cell(x), y)

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One of both."""
        if next(self._turns) == "function":
            _, found = self._function(*batches[self.rank])
            self.optimizer(found)
        else:
            self.forward(*batches[self.rank]).backward()
            self.optimizer(tuple([p.grad for p in self.optimizer.parameters]))
            self.cell.zero_grad()
        self.single.step(batches)
