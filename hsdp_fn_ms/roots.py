"""Which tree a cell belongs to."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn

from .binding import named_cells
from .group import group_of, groups_of
from .tree import Tree


def tree_of(cell: Any, *, outermost: bool = False) -> Tree:
    """The tree that the cell belongs to. The first cell that asks becomes the root of one; with ``outermost``, the
    outermost sharded cell above it does. Making one communicates one short message a rank.

    Raises:
        RuntimeError: a cell below was the root of a tree of its own; it can't be the root, being one of a list.
    """
    tree: Tree | None = cell.__dict__.get("_hsdp_tree")
    if tree is not None:
        return tree
    above = cell.__dict__.get("_hsdp_inner")
    root = (above() if outermost and above is not None else None) or cell
    below = [c for _, c in named_cells(root)]
    for name, c in named_cells(root):
        if "_hsdp_tree" in c.__dict__:
            raise RuntimeError(f"cell {name!r} ran as a root of its own before {type(root).__name__}")
    if len(group_of(root).modules) > 1:
        raise RuntimeError("fully_shard of a list can't be the single root module; shard the cell around it too")
    with ms._no_grad():
        tree = Tree(root, groups_of(root))
    for c in below:
        if "_hsdp_group" in c.__dict__:
            c.__dict__["_hsdp_tree"] = tree
    return tree


def root_tree(cell: nn.Cell, function: str) -> Tree:
    """The tree of a root; see `tree_of`.

    Raises:
        TypeError: no cell of `fully_shard`. RuntimeError: not the root.
    """
    if not isinstance(cell, nn.Cell) or "_hsdp_group" not in cell.__dict__:
        raise TypeError(f"{function} takes a state or a cell of fully_shard, found {type(cell).__name__}")
    if cell.__dict__.get("_hsdp_inner") is not None or (tree := tree_of(cell)).root is not cell:
        raise RuntimeError(f"{function} takes the root: the state is the whole tree's")
    return tree


def names_of(cell: Any) -> dict[int, str]:
    """Fully qualified names of the parameters of a cell's tree, by identity; empty before there is one."""
    tree: Tree | None = cell.__dict__.get("_hsdp_tree")
    if tree is None or not tree.groups:
        return {}
    units = zip(tree.groups, tree.committed.layout.units, strict=True)
    return {id(p): spec.name for g, plan in units for p, spec in zip(g.params, plan.params, strict=True)}
