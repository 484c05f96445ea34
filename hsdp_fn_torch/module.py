"""`HSDPModule`: what a module whose parameters are sharded can do.

Calling the module goes through its tree's frame. Everything else here changes settings, which the frame reads when it
needs them, or asks the tree.

Methods that take ``recurse`` apply to the modules below as well, unless it is False; the others to this module alone.
None of the setters communicates (but `set_symm_mem_for_comm`), and all ranks must make the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import deprecated

from hsdp_fn import HSDPState, Keep, PolicyError, ReductionPolicy, Sync
from hsdp_fn import describe as describe_state

from .comm import AllGather, ReduceScatter
from .compiling import not_traced
from .dtensor import over
from .group import Group, group_of, groups_of
from .roots import existing_tree, own_parameters, tree_of
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


class HSDPModule(_Base):
    """What `fully_shard` makes of a module's class."""

    _original_at = 2  # where the original class stands in the order of bases

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing from the extended class (slicing a Sequential does) gives an ordinary module."""
        original: Any = cls.__mro__[cls._original_at]
        return original(*args, **kwargs)

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

    # -- the state ----------------------------------------------------------------------------------------------

    @property
    def hsdp_state(self) -> HSDPState:
        """The explicit state of the whole tree: the committed one, or the units as they stand while an iteration is
        under way. Exists from the first forward on."""
        return existing_tree(self).state

    def describe(self) -> str:
        """The state as a table, for people."""
        return describe_state(self.hsdp_state)

    def reset_iter_state(self, recursive: bool = True, *, keep: Keep = Keep.NOTHING) -> None:
        """Back to before the iteration, after an exception or at any moment: waits for what is in flight, reshards, and
        drops the gradients that earlier microbatches have held back. ``.grad`` that they have given stays.

        Args:
            recursive: must be True; the state is the whole tree's.
            keep: ``Keep.ACCUMULATED`` keeps what earlier microbatches have held back, so that only the one that failed
                has to be run again.

        Raises:
            RuntimeError: not called on the root.
        """
        require_bool("recursive", recursive)
        if not recursive:
            raise PolicyError("reset_iter_state resets the whole tree; recursive=False isn't possible")
        tree: Tree | None = self.__dict__.get("_hsdp_tree")
        if self.__dict__.get("_hsdp_inner") is not None or (tree is not None and tree.root is not self):
            raise RuntimeError("reset_iter_state must be called on the root module")
        if not isinstance(keep, Keep):
            raise PolicyError(f"keep must be a Keep (NOTHING or ACCUMULATED), found {keep!r}")
        if tree is not None:
            tree.reset(keep)

    def finish_accumulation(self) -> None:
        """Reduce what microbatches have held back (without gradient sync, or without all-reduce) and add it to
        ``.grad``, where no backward with sync follows that would do it. Without effect where nothing is held, except
        that with `set_reduce_scatter_unused_params` all units take part, and parameters without gradient get zeros.

        Communicates: what such a backward would, for the units that hold something. Of the root.

        Raises:
            PhaseError: inside a forward or backward. RuntimeError: not called on the root.
        """
        tree: Tree | None = self.__dict__.get("_hsdp_tree")
        if self.__dict__.get("_hsdp_inner") is not None or (tree is not None and tree.root is not self):
            raise RuntimeError("finish_accumulation must be called on the root module")
        if tree is not None and tree.groups:
            tree.finish_accumulation()

    def set_strict_iterations(self, strict: bool = True) -> None:
        """Whether a backward that stopped in the middle has to be answered by `reset_iter_state`: the next forward,
        state dict or look at the parameters raises RuntimeError until then. By default it is undone with a warning. Of
        the root."""
        require_bool("strict", strict)
        self._tree_or_settings().strict = strict

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

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward communicates gradients. False accumulates them whole (``Sync.NONE``): each rank keeps the
        gradient of all parameters until the next backward that does."""
        require_bool("requires_gradient_sync", requires_gradient_sync)
        for group in groups_of(self, recurse):
            group.handling.sync = Sync.FULL if requires_gradient_sync else Sync.NONE

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over the replicate axis. False keeps reduce-scattered sums (``Sync.SHARD``).
        Without a replicate axis there is nothing to switch."""
        require_bool("requires_all_reduce", requires_all_reduce)
        for group in groups_of(self, recurse):
            if group.hybrid and group.handling.sync is not Sync.NONE:
                group.handling.sync = Sync.FULL if requires_all_reduce else Sync.SHARD

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after forward, overriding the root's default."""
        require_bool("reshard_after_forward", reshard_after_forward)
        for group in groups_of(self, recurse):
            group.settings.reshard_after_forward = reshard_after_forward
            group.handling.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after backward. False saves the next microbatch's gather."""
        require_bool("reshard_after_backward", reshard_after_backward)
        for group in groups_of(self, recurse):
            group.handling.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this module again. With False (for an embedding, say) it is gathered only if
        autograd needs a parameter after all."""
        require_bool("unshard_in_backward", unshard_in_backward)
        group_of(self).handling.unshard_in_backward = unshard_in_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether further backwards of the same iteration follow the next one. If so, what was gathered for them
        already stays gathered. (Gradients are complete after every backward; there is nothing else to put off.)"""
        require_bool("is_last_backward", is_last_backward)
        self._tree_or_settings().last_backward = is_last_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """Start gathering these as soon as this module's parameters are there in forward, instead of the one that ran
        next the last time. Each costs its unsharded parameters of memory."""
        self._set_prefetch("forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """The same for backward, instead of the one that ran before this in forward."""
        self._set_prefetch("backward_prefetch", modules)

    def set_post_optim_event(self, event: Any) -> None:
        """The next root forward's gathers come after this event (recorded after the optimizer's step), once."""
        if not (hasattr(event, "wait") and hasattr(event, "record")):
            raise PolicyError(f"expected an event with record and wait, such as torch.Event, found {event!r}")
        self._tree_or_settings().post_optimizer_event = event

    # -- what the gradients are ---------------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's gradients by ``factor`` instead of the number of data-parallel ranks. 1.0: a sum."""
        settings = group_of(self).settings
        r = settings.reduction
        settings.reduction = ReductionPolicy(r.op, factor, r.scaling_factor, r.unused)

    @deprecated("Use set_gradient_divide_factor")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """`set_gradient_divide_factor`, by its older name."""
        self.set_gradient_divide_factor(factor)

    def set_gradient_scaling_factor(self, factor: float | Tensor | None = None) -> None:
        """Multiply this module's reduced gradients by a positive number, once, after the division. None: don't."""
        number: Any = factor.item() if isinstance(factor, Tensor) and factor.numel() == 1 else factor
        settings = group_of(self).settings
        r = settings.reduction
        settings.reduction = ReductionPolicy(r.op, r.divide_factor, number, r.unused)

    def set_reduce_op_type(self, op: str, recurse: bool = True) -> None:
        """``"avg"`` or ``"sum"`` over the data-parallel ranks. A divide factor goes before either."""
        name = op.strip().lower() if isinstance(op, str) else op
        ReductionPolicy(name)
        for group in groups_of(self, recurse):
            r = group.settings.reduction
            group.settings.reduction = ReductionPolicy(name, r.divide_factor, r.scaling_factor, r.unused)

    def set_check_unused_params(self, check: bool = True, *, recurse: bool = True) -> None:
        """Compare before each reduction which parameters have gradients on which ranks, and raise RankMismatchError on
        all if these differ. Communicates one short message a rank and unit in each backward: for debugging."""
        require_bool("check", check)
        for group in groups_of(self, recurse):
            group.settings.reduction = replace(group.settings.reduction, unused="checked" if check else "none")

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether a trainable parameter without a gradient counts as one of zeros, so that ranks may use different
        parameters. Otherwise its ``.grad`` stays None."""
        require_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for group in groups_of(self, recurse):
            r = group.settings.reduction
            unused = "zeros" if reduce_scatter_unused_params else "none"
            group.settings.reduction = ReductionPolicy(r.op, r.divide_factor, r.scaling_factor, unused)

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

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight, each holding a unit's whole gradient. More never changes numbers.

        Raises:
            TypeError: not an int; ValueError: below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, found {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise PolicyError(f"max_input_buffers must be at least 1, found {max_input_buffers}")
        for group in groups_of(self, recurse):
            group.handling.max_reductions = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reduce-scatters a process group of their own, one for all modules that share their ranks."""
        require_bool("enable", enable)
        for group in groups_of(self, recurse):
            group.comm.set_separate_reduce_scatter_group(enable)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: reductions always are sums, scaled afterwards by one multiplication (all that gloo and HCCL do)."""
        require_bool("enable", enable)

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

    def _tree_or_settings(self) -> Any:
        """Who keeps what concerns the whole tree: before there is one, the settings of its root to be."""
        tree = self.__dict__.get("_hsdp_tree")
        return tree if tree is not None else group_of(self).settings

    def _set_prefetch(self, which: str, modules: Sequence[HSDPModule]) -> None:
        if not isinstance(modules, (list, tuple)):
            raise PolicyError(f"expected a list of HSDPModules to prefetch, found {modules!r}")
        for module in modules:
            if not isinstance(module, HSDPModule):
                raise PolicyError(f"can prefetch HSDPModules only, found {type(module).__name__}: {module!r}")
        group, tree = group_of(self), self.__dict__.get("_hsdp_tree")
        before = getattr(group.settings, which)
        setattr(group.settings, which, [group_of(m) for m in modules] if modules else None)
        if tree is not None:
            try:
                tree.arrange()
            except ValueError:
                setattr(group.settings, which, before)
                tree.arrange()
                raise


def describe(what: nn.Module | HSDPState) -> str:
    """An explicit state as a table, for people; of a sharded module, its tree's.

    Raises:
        RuntimeError: the module hasn't run yet.
    """
    return describe_state(what if isinstance(what, HSDPState) else existing_tree(what).state)


def require_bool(name: str, value: object) -> None:
    """Raises PolicyError (a ValueError) unless it is one."""
    if not isinstance(value, bool):
        raise PolicyError(f"{name} must be a bool, found {value!r}")
