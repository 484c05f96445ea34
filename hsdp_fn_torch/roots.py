"""Which tree a module belongs to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .gather import plainly
from .group import group_of, groups_of
from .tree import Tree


def tree_of(module: Any, *, outermost: bool = False) -> Tree:
    """The tree that the module belongs to. The first module that asks becomes the root of one; with ``outermost``, the
    outermost sharded module above it does. Making one communicates one short message a rank.

    Raises:
        RuntimeError: a module below was the root of a tree of its own; it can't be the root, being one of a list.
    """
    tree: Tree | None = module.__dict__.get("_hsdp_tree")
    if tree is not None:
        return tree
    above = module.__dict__.get("_hsdp_inner")
    root = (above() if outermost and above is not None else None) or module
    for m in root.modules():
        if "_hsdp_tree" in m.__dict__:
            name = next(n for n, other in root.named_modules() if other is m)
            raise RuntimeError(f"module {name!r} ran forward as a root of its own before {type(root).__name__}")
    if len(group_of(root).modules) > 1:
        raise RuntimeError("fully_shard of a list can't be the single root module; shard the module around it too")
    with plainly():
        tree = Tree(root, groups_of(root))
    for m in root.modules():
        if "_hsdp_group" in m.__dict__:
            m.__dict__["_hsdp_tree"] = tree
    return tree


def own_parameters(module: Any) -> AbstractContextManager[None]:
    """`Tree.own_parameters` of the module's tree, if it has one."""
    tree: Tree | None = module.__dict__.get("_hsdp_tree")
    return tree.own_parameters() if tree is not None else nullcontext()
