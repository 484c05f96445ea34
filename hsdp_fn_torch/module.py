"""`HSDPModule`: what a module whose parameters are sharded can do.

Calling the module goes through its tree's frame. Everything else here, and in the core's `Setters`, changes settings,
which the frame reads when it needs them, or asks the tree.

Methods that take ``recurse`` apply to the modules below as well, unless it is False; the others to this module alone.
None of the setters communicates (but `set_symm_mem_for_comm`), and all ranks must make the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp_fn import HSDPState, PolicyError
from hsdp_fn import describe as describe_state
from hsdp_fn.arguments import require_bool
from hsdp_fn.extending import original_class
from hsdp_fn.setters import Setters, existing_tree

from .comm import AllGather, ReduceScatter
from .compiling import not_traced
from .dtensor import over
from .group import Group, group_of, groups_of
from .roots import own_parameters, tree_of
from .state_dict import load_into
from .tree import Tree


class UnshardHandle:
    """A gather by `HSDPModule.unshard` that may be in flight."""

    def __init__(self, tree: Tree | None, group: Group) -> None:
        self._tree, self._group = tree, group

    def wait(self) -> None:
        """The full parameters stand in the module afterwards. May be called again; forward waits too."""
        tree, self._tree = self._tree, None
        if tree is not None:
            tree.finish_unshard(self._group)


if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object  # the other base is the module's class


class HSDPModule(Setters, _Base):
    """What `fully_shard` makes of a module's class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing from the extended class (slicing a Sequential does) gives an ordinary module."""
        return original_class(cls, HSDPModule)(*args, **kwargs)

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_of(self).run(group_of(self), self, super().__call__, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("HSDP modules don't support deepcopy; copy the module before fully_shard")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} can't be pickled or copied; save get_model_state_dict(module), or copy the module "
            f"before fully_shard"
        )

    def _hsdp_groups(self, recurse: bool) -> list[Group]:
        return groups_of(self, recurse)

    # -- parameters ---------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters, which then stand in it as plain tensors (of ``param_dtype``) until
        `reshard`, until its forward frees them (``reshard_after_forward``), or until a backward has ended. They take
        part in autograd: gradients of what is computed with them are reduced in the next backward.

        Communicates: one all-gather a dtype over the shard group, unless they are there.

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
        """Free this module's full parameters, if it has any. Does not communicate, but waits for a gather in flight.
        What autograd has saved of parameters that weren't to be resharded after forward stays until its backward."""
        tree: Tree | None = self.__dict__.get("_hsdp_tree")
        if tree is not None and group_of(self).layout is not None:
            tree.reshard(group_of(self))

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """The sharded parameters, even while the module holds full ones for backward (which FSDP2 lists then).
        Inside forward: what stands there."""
        tree: Tree | None = self.__dict__.get("_hsdp_tree")
        with nullcontext() if tree is None or tree.running else tree.own_parameters():
            return iter(list(super().named_parameters(prefix, recurse, remove_duplicate)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Sharded DTensors that share the masters' memory, in any phase. Does not communicate."""
        with own_parameters(self):
            found = super().state_dict(*args, **kwargs)
        for name, value in found.items():
            if isinstance(value, DTensor):  # detached, with the local tensor's offset
                found[name] = over(value._local_tensor, value._spec)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load shards or full tensors; see `hsdp_fn_torch.state_dict.load_into`. Does not communicate for these."""
        with own_parameters(self):
            return load_into(self, state_dict, strict=strict, assign=assign)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero in place) ``.grad``, and ``main_grad`` where there is one, of this module's parameters."""
        with own_parameters(self):
            for param in self.parameters():
                if (main := getattr(param, "main_grad", None)) is not None:
                    param.main_grad = None if set_to_none else main.zero_()  # type: ignore[attr-defined]
            super().zero_grad(set_to_none)

    def zero_grads(self) -> None:
        """`zero_grad`, by HyperParallel's older name."""
        self.zero_grad()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with own_parameters(self):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    # -- when to communicate ------------------------------------------------------------------------------------

    def set_post_optim_event(self, event: Any) -> None:
        """The next root forward's gathers come after this event (recorded after the optimizer's step), once."""
        if not (hasattr(event, "wait") and hasattr(event, "record")):
            raise PolicyError(f"expected an event with record and wait, such as torch.Event, found {event!r}")
        self._tree_or_settings().post_optimizer_event = event

    # -- what the gradients are ---------------------------------------------------------------------------------

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None] | None, *, stream: Any = None) -> None:
        """Let ``hook`` edit this module's reduced gradient in place, as one flat tensor a dtype, before it becomes
        ``.grad``; see `UnitComm.set_all_reduce_hook`.

        Raises:
            ValueError: a stream, on a mesh that replicates.
        """
        group = group_of(self)
        group.comm.set_all_reduce_hook(hook, stream=stream, replicates=group.hybrid)

    # -- how it communicates ------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters with an object of the user's; see `hsdp_fn_torch.comm.AllGather`."""
        group_of(self).comm.set_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this module's gradients with the user's object; see `hsdp_fn_torch.comm.ReduceScatter`."""
        group_of(self).comm.set_reduce_scatter(comm)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reduce-scatters a process group of their own, one for all modules that share their ranks."""
        require_bool("enable", enable)
        for group in groups_of(self, recurse):
            group.comm.set_separate_reduce_scatter_group(enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take communication buffers from the process group's allocator, where it has one.

        Raises:
            AssertionError: a custom collective was set.
        """
        group_of(self).comm.set_allocate_from_group(enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Communicate through symmetric memory. Communicates: a barrier.

        Raises:
            NotImplementedError: the process group isn't NCCL on CUDA.
        """
        group = group_of(self)
        if group.layout is not None and len({b.mesh for b in group.layout.units[0].buckets if b.mesh.shard}) > 1:
            raise NotImplementedError("symmetric memory for a unit whose parameters are on several meshes")
        ranks = group.backend.group(group.data.spec, group.data.spec.shard)
        group.comm.set_symm_mem(ranks, group.backend.device, backend)


def describe(what: nn.Module | HSDPState) -> str:
    """An explicit state as a table, for people; of a sharded module, its tree's.

    Raises:
        RuntimeError: the module hasn't run yet.
    """
    return describe_state(what if isinstance(what, HSDPState) else existing_tree(what).state)
