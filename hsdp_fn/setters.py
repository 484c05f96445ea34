"""What a sharded module lets its users set, in any framework.

Setters write to a group's `Settings` and `Handling`, which are read when they matter. None of them communicates, and
all ranks must make the same settings. Those that take ``recurse`` apply to the modules below as well, unless it is
False; the others to this module alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from .arguments import require_bool
from .backend import Tensor
from .errors import PolicyError
from .handling import Handling
from .inspect import describe as describe_state
from .policy import Keep, ReductionPolicy, Sync
from .settings import Settings
from .state import HSDPState


class SetterGroup(Protocol):
    """The unit that a module belongs to."""

    @property
    def settings(self) -> Settings:
        """What users have set."""
        ...

    @property
    def handling(self) -> Handling:
        """How frames treat it."""
        ...

    @property
    def hybrid(self) -> bool:
        """Whether a mesh of it both shards and replicates."""
        ...


class SetterTree(Protocol):
    """All groups at and below a root.

    Attributes:
        last_backward, strict: see the setters.
    """

    last_backward: bool
    strict: bool

    @property
    def root(self) -> object:
        """The module that ran forward first."""
        ...

    @property
    def groups(self) -> Sequence[object]:
        """Those with parameters."""
        ...

    @property
    def state(self) -> HSDPState:
        """The committed state, or, while an iteration is under way, the units as they stand."""
        ...

    def arrange(self) -> None:
        """Work out again what settings mean in this tree. Raises ValueError for groups of another tree."""
        ...

    def reset(self, keep: Keep) -> None:
        """Back to before the iteration."""
        ...

    def finish_accumulation(self) -> None:
        """Reduce what microbatches have held back."""
        ...


class Setters:
    """The part of a framework's ``HSDPModule`` that needs nothing of the framework.

    The module's ``__dict__`` holds its group as ``_hsdp_group``; its tree as ``_hsdp_tree``, once there is one; and
    ``_hsdp_inner`` if it stands below another sharded module.
    """

    def _hsdp_groups(self, recurse: bool) -> Sequence[SetterGroup]:
        """The module's group, and with ``recurse`` those of the modules below, each once."""
        raise NotImplementedError

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
        tree = _tree_of(self)
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
        tree = _tree_of(self)
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

    # -- when to communicate ------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward communicates gradients. False accumulates them whole (``Sync.NONE``): each rank keeps the
        gradient of all parameters until the next backward that does."""
        require_bool("requires_gradient_sync", requires_gradient_sync)
        for group in self._hsdp_groups(recurse):
            group.handling.sync = Sync.FULL if requires_gradient_sync else Sync.NONE

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over the replicate axis. False keeps reduce-scattered sums (``Sync.SHARD``).
        Without a replicate axis there is nothing to switch."""
        require_bool("requires_all_reduce", requires_all_reduce)
        for group in self._hsdp_groups(recurse):
            if group.hybrid and group.handling.sync is not Sync.NONE:
                group.handling.sync = Sync.FULL if requires_all_reduce else Sync.SHARD

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after forward, overriding the root's default."""
        require_bool("reshard_after_forward", reshard_after_forward)
        for group in self._hsdp_groups(recurse):
            group.settings.reshard_after_forward = reshard_after_forward
            group.handling.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after backward. False saves the next microbatch's gather."""
        require_bool("reshard_after_backward", reshard_after_backward)
        for group in self._hsdp_groups(recurse):
            group.handling.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this module again. With False (for an embedding, say) it is gathered only if
        autograd needs a parameter after all."""
        require_bool("unshard_in_backward", unshard_in_backward)
        _group_of(self).handling.unshard_in_backward = unshard_in_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether further backwards of the same iteration follow the next one. If so, what was gathered for them
        already stays gathered. (Gradients are complete after every backward; there is nothing else to put off.)"""
        require_bool("is_last_backward", is_last_backward)
        self._tree_or_settings().last_backward = is_last_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[Setters]) -> None:
        """Start gathering these as soon as this module's parameters are there in forward, instead of the one that ran
        next the last time. Each costs its unsharded parameters of memory."""
        self._set_prefetch("forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Setters]) -> None:
        """The same for backward, instead of the one that ran before this in forward."""
        self._set_prefetch("backward_prefetch", modules)

    # -- what the gradients are ---------------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's gradients by ``factor`` instead of the number of data-parallel ranks. 1.0: a sum."""
        settings = _group_of(self).settings
        r = settings.reduction
        settings.reduction = ReductionPolicy(r.op, factor, r.scaling_factor, r.unused)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """`set_gradient_divide_factor`, by its older name."""
        warnings.warn("Use set_gradient_divide_factor", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_gradient_scaling_factor(self, factor: float | Tensor | None = None) -> None:
        """Multiply this module's reduced gradients by a positive number, once, after the division. None: don't."""
        settings = _group_of(self).settings
        r = settings.reduction
        settings.reduction = ReductionPolicy(r.op, r.divide_factor, _number(factor), r.unused)

    def set_reduce_op_type(self, op: str, recurse: bool = True) -> None:
        """``"avg"`` or ``"sum"`` over the data-parallel ranks. A divide factor goes before either."""
        name = op.strip().lower() if isinstance(op, str) else op
        ReductionPolicy(name)
        for group in self._hsdp_groups(recurse):
            r = group.settings.reduction
            group.settings.reduction = ReductionPolicy(name, r.divide_factor, r.scaling_factor, r.unused)

    def set_check_unused_params(self, check: bool = True, *, recurse: bool = True) -> None:
        """Compare before each reduction which parameters have gradients on which ranks, and raise RankMismatchError on
        all if these differ. Communicates one short message a rank and unit in each backward: for debugging."""
        require_bool("check", check)
        for group in self._hsdp_groups(recurse):
            _set_unused(group.settings, "checked", check)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether a trainable parameter without a gradient counts as one of zeros, so that ranks may use different
        parameters. Otherwise its ``.grad`` stays None."""
        require_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for group in self._hsdp_groups(recurse):
            _set_unused(group.settings, "zeros", reduce_scatter_unused_params)

    # -- how it communicates ------------------------------------------------------------------------------------

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight, each holding a unit's whole gradient. More never changes numbers.

        Raises:
            TypeError: not an int; ValueError: below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, found {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise PolicyError(f"max_input_buffers must be at least 1, found {max_input_buffers}")
        for group in self._hsdp_groups(recurse):
            group.handling.max_reductions = max_input_buffers

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: reductions always are sums, scaled afterwards by one multiplication (all that gloo and HCCL do)."""
        require_bool("enable", enable)

    # -- parts --------------------------------------------------------------------------------------------------

    def _tree_or_settings(self) -> Any:
        """Who keeps what concerns the whole tree: before there is one, the settings of its root to be."""
        tree = _tree_of(self)
        return tree if tree is not None else _group_of(self).settings

    def _set_prefetch(self, which: str, modules: Sequence[Setters]) -> None:
        if not isinstance(modules, (list, tuple)):
            raise PolicyError(f"expected a list of HSDPModules to prefetch, found {modules!r}")
        for module in modules:
            if not isinstance(module, Setters):
                raise PolicyError(f"can prefetch HSDPModules only, found {type(module).__name__}: {module!r}")
        group, tree = _group_of(self), _tree_of(self)
        before = getattr(group.settings, which)
        setattr(group.settings, which, [_group_of(m) for m in modules] if modules else None)
        if tree is not None:
            try:
                tree.arrange()
            except ValueError:
                setattr(group.settings, which, before)
                tree.arrange()
                raise


def existing_tree(module: object) -> SetterTree:
    """The tree that the module belongs to.

    Raises:
        RuntimeError: there is none yet.
    """
    tree = _tree_of(module)
    if tree is None:
        raise RuntimeError("the state exists from the root's first forward on")
    return tree


def _set_unused(settings: Settings, way: str, on: bool) -> None:
    """What becomes of unused parameters. Switching off one way leaves the other on."""
    now = settings.reduction.unused
    settings.reduction = replace(settings.reduction, unused=way if on else "none" if now == way else now)


def _number(factor: Any) -> Any:
    """What a framework's tensor of one element holds; anything else as it is."""
    is_tensor = callable(getattr(factor, "item", None)) and callable(getattr(factor, "numel", None))
    return factor.item() if is_tensor and factor.numel() == 1 else factor


def _group_of(module: Setters) -> SetterGroup:
    group: SetterGroup = module.__dict__["_hsdp_group"]
    return group


def _tree_of(module: object) -> SetterTree | None:
    tree: SetterTree | None = module.__dict__.get("_hsdp_tree")
    return tree
