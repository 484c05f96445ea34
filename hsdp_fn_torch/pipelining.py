"""A stage of ``torch.distributed.pipelining`` over a module of `fully_shard`.

Torch's own `PipelineStage` knows torch's ``FSDPModule`` only. Over an `HSDPModule` it reduces in every microbatch; and
in schedules that split backward in two (zero bubble) it finds no weights, whose gradients then stay None in silence:
it looks for the parameters in the graph, which here ends at one node a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage as _TorchStage

from .module import HSDPModule

Given = dict[str, Any]


class PipelineStage(_TorchStage):
    """`torch.distributed.pipelining.PipelineStage`, whose module may be the root of a tree of `fully_shard`: gradients
    of all microbatches are held back and reduced once, after the last one, with every schedule of torch's. Use with
    ``set_reshard_after_forward(False)``, so that each unit is gathered once a step too.

    Where a schedule splits backward, the second half differentiates the stage again, with the graph of the first; what
    the stage's input gets there is thrown away. So the whole graph stays until then.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: Given, last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[Given] | None]:
        """Forward and backward only gather; see `perform_reduce_grad`."""
        module = self.submod
        if not isinstance(module, HSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
        if backward_type == "input":
            return _backward_of_inputs(bwd_kwargs)
        if backward_type == "weight":
            _backward_of_weights(bwd_kwargs["param_groups"])
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """All microbatches have been differentiated. Communicates: the stage's reductions."""
        module = self.submod
        if isinstance(module, HSDPModule):
            module.set_is_last_backward(True)
            module.set_reshard_after_backward(True)
            module.set_requires_gradient_sync(True)
            module.finish_accumulation()
            _reshard(module)
        super().perform_reduce_grad(grad_scale_factor)

    def _post_metadata_inference_cleanup(self) -> None:
        """What the first step runs to learn shapes leaves no gradients and nothing gathered."""
        super()._post_metadata_inference_cleanup()
        module = self.submod
        if isinstance(module, HSDPModule):
            module.reset_iter_state()
            _reshard(module)
            for param in module.parameters():
                param.grad = None


def _backward_of_inputs(given: Given) -> tuple[tuple[Tensor | None, ...], list[Given]]:
    """Gradients of the stage's inputs, added to their ``.grad`` as torch does, and what the second half needs."""
    outputs: Sequence[Tensor] = given["stage_output"]
    grads: Sequence[Tensor | None] = given["output_grads"] or [None] * len(outputs)
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=False) if out.requires_grad]
    kept: Given = {"outputs": [out for out, _ in pairs], "grads": [grad for _, grad in pairs]}
    inputs: Sequence[Any] = given["input_values"]
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    found: dict[int, Tensor | None] = {}
    if wanted and pairs:
        values = torch.autograd.grad(kept["outputs"], wanted, kept["grads"], retain_graph=True, allow_unused=True)
        found = {id(t): value for t, value in zip(wanted, values, strict=True)}
    for t in wanted:
        if (value := found.get(id(t))) is not None:
            t.grad = value if t.grad is None else t.grad + value
    kept["inputs"] = wanted
    return tuple(found.get(id(t)) for t in inputs), [kept]


def _backward_of_weights(groups: list[Given]) -> None:
    """The second half."""
    (kept,) = groups
    before = [t.grad for t in kept["inputs"]]
    for t in kept["inputs"]:
        t.grad = None  # the first half's may be on its way to the stage before; nothing is to be added to it
    if kept["outputs"]:
        torch.autograd.backward(kept["outputs"], kept["grads"])
    for t, grad in zip(kept["inputs"], before, strict=True):
        t.grad = grad
    kept.clear()


def _reshard(module: HSDPModule) -> None:
    for part in module.modules():
        if isinstance(part, HSDPModule):
            part.reshard()
