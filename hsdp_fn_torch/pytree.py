"""The state types as nodes of torch's own pytree, which ``torch.func`` and export use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as torch_pytree

from hsdp_fn.state import NODES


def _register(kind: type, flatten: Callable[[Any], tuple[Any, ...]], unflatten: Callable[[Any, Any], Any]) -> None:
    def take_apart(node: Any) -> tuple[list[Any], Any]:
        children, metadata, _ = flatten(node)
        return list(children), metadata

    def put_together(children: Any, metadata: Any) -> Any:
        return unflatten(metadata, tuple(children))

    name = f"hsdp_fn.{kind.__name__}"
    torch_pytree.register_pytree_node(kind, take_apart, put_together, serialized_type_name=name)


for _node in NODES:
    _register(*_node)
