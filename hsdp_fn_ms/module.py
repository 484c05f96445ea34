"""`HSDPModule`: what a cell whose parameters are sharded can do.

Calling the cell goes through its tree's frame. Everything else here, and in the core's `Setters`, changes settings,
which the frame reads when it needs them, or asks the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mindspore import Parameter, Tensor

from hsdp_fn.arguments import require_bool
from hsdp_fn.extending import original_class
from hsdp_fn.setters import SetterGroup, Setters

from . import compat
from .group import Group, group_of, groups_of
from .roots import tree_of
from .state_dict import Incompatible, load_into
from .tree import Tree


class UnshardHandle:
    """A gather by `HSDPModule.unshard` that may be in flight."""

    def __init__(self, tree: Tree | None, group: Group) -> None:
        self._tree, self._group = tree, group

    def wait(self) -> None:
        """The full parameters stand in the cell afterwards. May be called again; forward waits too."""
        tree, self._tree = self._tree, None
        if tree is not None:
            tree.finish_unshard(self._group)


if TYPE_CHECKING:
    from mindspore.nn import Cell as _Base
else:
    _Base = object  # the other base is the cell's class


class HSDPModule(Setters, _Base):  # type: ignore[misc]
    """What `fully_shard` makes of a cell's class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing from the extended class gives an ordinary cell."""
        return original_class(cls, HSDPModule)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_of(self).run(group_of(self), self, super().__call__, args, kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError("HSDP modules don't support deepcopy; copy the cell before fully_shard")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be pickled or copied; save get_model_state_dict(cell), or copy the cell "
            f"before fully_shard"
        )

    def _hsdp_groups(self, recurse: bool) -> Sequence[SetterGroup]:
        return groups_of(self, recurse)

    # -- parameters ---------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this cell's parameters, which then stand in it as plain tensors (of ``param_dtype``) until `reshard`,
        until its forward frees them (``reshard_after_forward``), or until a backward has ended. Where a forward would
        be recorded, they take part in autograd.

        Communicates: one all-gather a dtype over the shard group, unless they are there. While any are, the next
        forward asks all ranks with one small all-reduce whether parameters have changed since, and gathers anew if so.

        Args:
            async_op: return a handle instead of waiting. Forward waits in any case.
        """
        require_bool("async_op", async_op)
        group, tree = group_of(self), None
        if group.layout is not None:
            tree = tree_of(self, outermost=True)
            tree.unshard(group, wait=not async_op)
        return UnshardHandle(tree, group) if async_op else None

    def reshard(self) -> None:
        """Free this cell's full parameters, if it has any. Does not communicate, but waits for a gather in flight."""
        tree: Tree | None = self.__dict__.get("_hsdp_tree")
        if tree is not None and group_of(self).layout is not None:
            tree.reshard(group_of(self))

    def trainable_params(self, recurse: bool = True) -> list[Parameter]:
        """Parameters that get gradients. Those of which this rank has no row are left out: MindSpore's optimizers don't
        take empty ones."""
        return [p for p in super().trainable_params(recurse) if p.size]

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> Incompatible:
        """Load full values, or this rank's rows; see `hsdp_fn_ms.state_dict.load_into`. Does not communicate."""
        return load_into(self, state_dict, strict=strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or replace by zeros) ``.grad``, and ``main_grad`` where there is one, of this cell's parameters."""
        require_bool("set_to_none", set_to_none)
        compat.zero_grad(self, set_to_none)

    def zero_grads(self) -> None:
        """`zero_grad`, by HyperParallel's older name."""
        self.zero_grad()
