"""What a sharded module lets its users set, without a framework, and the layout of all its groups."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest

from hsdp_fn import (
    CPUOffloadPolicy,
    HSDPState,
    Keep,
    MeshSpec,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OnMesh,
    ParamSpec,
    PolicyError,
    ReductionPolicy,
    Replicate,
    Shard,
    Sync,
)
from hsdp_fn.handling import Handling, reducing_fully
from hsdp_fn.setters import Setters, existing_tree
from hsdp_fn.settings import GroupPlan, Settings, arrange, plan_groups


def settings(**fields: Any) -> Settings:
    return Settings(None, MixedPrecisionPolicy(), ReductionPolicy(), **fields)


@dataclass(eq=False)
class Group:
    hybrid: bool = False
    settings: Settings = field(default_factory=settings)
    handling: Handling = field(default_factory=Handling)


class Tree:
    """Notes what it is asked; refuses to prefetch groups that aren't its own."""

    def __init__(self, root: Module, groups: list[Group]) -> None:
        self.root, self.groups, self.asked = root, groups, []
        self.strict, self.last_backward = False, True

    @property
    def state(self) -> HSDPState:
        raise LookupError("the state was asked for")

    def arrange(self) -> None:
        for group in self.groups:
            if not set(group.settings.forward_prefetch or ()) <= set(self.groups):
                raise ValueError("strangers")
        self.asked.append("arrange")

    def reset(self, keep: Keep) -> None:
        self.asked.append(keep)

    def finish_accumulation(self) -> None:
        self.asked.append("finish")


class Module(Setters):
    """A module of a framework without tensors."""

    def __init__(self, *below: Module, hybrid: bool = False) -> None:
        self.below = below
        self._hsdp_group = Group(hybrid)
        for module in below:
            module._hsdp_inner = weakref.ref(self)

    def _hsdp_groups(self, recurse: bool) -> list[Group]:
        return [self._hsdp_group, *(m._hsdp_group for m in self.below if recurse)]


class Scalar:
    """A framework's tensor of some elements."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def numel(self) -> int:
        return len(self.values)

    def item(self) -> float:
        return self.values[0]


def with_tree() -> tuple[Module, Module, Tree]:
    inner = Module()
    root = Module(inner)
    tree = root._hsdp_tree = inner._hsdp_tree = Tree(root, [root._hsdp_group, inner._hsdp_group])
    return root, inner, tree


# ------------------------------------------------------------------------------------------------------------ setters

RECURSIVE = [
    ("set_requires_gradient_sync", False, lambda g: g.handling.sync, Sync.NONE),
    ("set_reshard_after_forward", False, lambda g: g.handling.reshard_after_forward, False),
    ("set_reshard_after_forward", False, lambda g: g.settings.reshard_after_forward, False),
    ("set_reshard_after_backward", False, lambda g: g.handling.reshard_after_backward, False),
    ("set_reduce_op_type", " SUM ", lambda g: g.settings.reduction.op, "sum"),
    ("set_check_unused_params", True, lambda g: g.settings.reduction.unused, "checked"),
    ("set_reduce_scatter_unused_params", True, lambda g: g.settings.reduction.unused, "zeros"),
    ("set_reduce_scatter_max_input_buffers", 3, lambda g: g.handling.max_reductions, 3),
]
ALONE = [
    ("set_unshard_in_backward", False, lambda g: g.handling.unshard_in_backward, False),
    ("set_gradient_divide_factor", 2.0, lambda g: g.settings.reduction.divide_factor, 2.0),
    ("set_gradient_scaling_factor", 3.0, lambda g: g.settings.reduction.scaling_factor, 3.0),
]


@pytest.mark.parametrize(("setter", "value", "found", "wanted"), RECURSIVE)
def test_setters_that_recurse_reach_the_modules_below_unless_told_not_to(setter, value, found, wanted):
    inner = Module()
    root = Module(inner)
    getattr(root, setter)(value, recurse=False)
    assert found(root._hsdp_group) == wanted != found(inner._hsdp_group)
    getattr(root, setter)(value)
    assert found(inner._hsdp_group) == wanted


@pytest.mark.parametrize(("setter", "value", "found", "wanted"), ALONE)
def test_the_others_concern_one_module(setter, value, found, wanted):
    inner = Module()
    root = Module(inner)
    getattr(root, setter)(value)
    assert found(root._hsdp_group) == wanted != found(inner._hsdp_group)


def test_all_reduces_are_switched_only_where_a_mesh_replicates_and_gradients_are_synchronized():
    hybrid, plain = Module(hybrid=True), Module()
    for module in (hybrid, plain):
        module.set_requires_all_reduce(False)
    assert (hybrid._hsdp_group.handling.sync, plain._hsdp_group.handling.sync) == (Sync.SHARD, Sync.FULL)
    hybrid.set_requires_all_reduce(True)
    assert hybrid._hsdp_group.handling.sync is Sync.FULL
    hybrid.set_requires_gradient_sync(False)
    hybrid.set_requires_all_reduce(False)
    assert hybrid._hsdp_group.handling.sync is Sync.NONE


def test_a_setter_of_reductions_leaves_what_the_others_have_set():
    module = Module()
    for _ in range(2):  # each after all the others
        module.set_gradient_divide_factor(2.0)
        module.set_gradient_scaling_factor(3.0)
        module.set_reduce_op_type("sum")
        module.set_reduce_scatter_unused_params(True)
    assert module._hsdp_group.settings.reduction == ReductionPolicy("sum", 2.0, 3.0, "zeros")


def test_a_scaling_factor_may_be_a_tensor_of_one_element_of_any_framework():
    module = Module()
    module.set_gradient_scaling_factor(Scalar(4.0))
    assert module._hsdp_group.settings.reduction.scaling_factor == 4.0
    for wrong in (Scalar(4.0, 5.0), Scalar(-1.0), Scalar(True), "4", True):
        with pytest.raises(PolicyError, match="scaling_factor must be a positive finite number or None"):
            module.set_gradient_scaling_factor(wrong)
    assert module._hsdp_group.settings.reduction.scaling_factor == 4.0
    module.set_gradient_scaling_factor(None)
    assert module._hsdp_group.settings.reduction.scaling_factor is None


def test_the_older_name_of_the_divide_factor_says_the_newer_one():
    module = Module()
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor") as caught:
        module.set_reduce_scatter_divide_factor(2.0)
    assert caught[0].filename == __file__
    assert module._hsdp_group.settings.reduction.divide_factor == 2.0


@pytest.mark.parametrize(
    ("setter", "value", "error", "text"),
    [
        ("set_requires_gradient_sync", 1, PolicyError, "requires_gradient_sync must be a bool, found 1"),
        ("set_requires_all_reduce", None, PolicyError, "requires_all_reduce must be a bool"),
        ("set_reshard_after_forward", 2, PolicyError, "reshard_after_forward must be a bool, found 2"),
        ("set_reshard_after_backward", "no", PolicyError, "reshard_after_backward must be a bool"),
        ("set_unshard_in_backward", 0, PolicyError, "unshard_in_backward must be a bool"),
        ("set_is_last_backward", 0, PolicyError, "is_last_backward must be a bool"),
        ("set_strict_iterations", 0, PolicyError, "strict must be a bool"),
        ("set_check_unused_params", 0, PolicyError, "check must be a bool"),
        ("set_reduce_scatter_unused_params", 0, PolicyError, "reduce_scatter_unused_params must be a bool"),
        ("set_force_sum_reduction_for_comms", 0, PolicyError, "enable must be a bool"),
        ("set_reduce_op_type", "max", PolicyError, "op must be 'avg' or 'sum', found 'max'"),
        ("set_gradient_divide_factor", 0.0, PolicyError, "divide_factor must be a positive finite number"),
        ("set_reduce_scatter_max_input_buffers", True, TypeError, "max_input_buffers must be an int, found True"),
        ("set_reduce_scatter_max_input_buffers", 0, PolicyError, "max_input_buffers must be at least 1, found 0"),
        ("set_modules_to_forward_prefetch", None, PolicyError, "expected a list of HSDPModules to prefetch"),
        ("set_modules_to_backward_prefetch", [3], PolicyError, "can prefetch HSDPModules only, found int"),
    ],
)
def test_a_wrong_value_is_refused_and_changes_nothing(setter, value, error, text):
    module = Module(hybrid=True)
    with pytest.raises(error, match=text):
        getattr(module, setter)(value)
    group = Group()
    assert module._hsdp_group.settings == group.settings
    assert [getattr(module._hsdp_group.handling, n) for n in Handling.__slots__] == [
        getattr(group.handling, n) for n in Handling.__slots__
    ]


def test_what_concerns_the_whole_tree_waits_in_the_settings_until_there_is_one():
    module = Module()
    module.set_is_last_backward(False)
    module.set_strict_iterations()
    assert (module._hsdp_group.settings.last_backward, module._hsdp_group.settings.strict) == (False, True)
    root, _, tree = with_tree()
    root.set_is_last_backward(False)
    root.set_strict_iterations()
    assert (tree.last_backward, tree.strict) == (False, True)
    assert (root._hsdp_group.settings.last_backward, root._hsdp_group.settings.strict) == (True, False)


def test_prefetch_lists_hold_groups_and_strangers_leave_the_list_before():
    root, inner, tree = with_tree()
    root.set_modules_to_forward_prefetch([inner])
    assert root._hsdp_group.settings.forward_prefetch == [inner._hsdp_group]
    with pytest.raises(ValueError, match="strangers"):
        root.set_modules_to_forward_prefetch([Module()])
    assert root._hsdp_group.settings.forward_prefetch == [inner._hsdp_group]
    root.set_modules_to_forward_prefetch([])
    assert root._hsdp_group.settings.forward_prefetch is None
    assert tree.asked == ["arrange"] * 3  # after each list that stands


# ---------------------------------------------------------------------------------------------------------- the state


def test_the_root_alone_resets_and_finishes():
    root, inner, tree = with_tree()
    root.reset_iter_state()
    root.reset_iter_state(keep=Keep.ACCUMULATED)
    root.finish_accumulation()
    assert tree.asked == [Keep.NOTHING, Keep.ACCUMULATED, "finish"]
    above = Module(Module())
    for below in (inner, above.below[0]):  # with a tree, and before there is one
        with pytest.raises(RuntimeError, match="reset_iter_state must be called on the root module"):
            below.reset_iter_state()
        with pytest.raises(RuntimeError, match="finish_accumulation must be called on the root module"):
            below.finish_accumulation()
    with pytest.raises(PolicyError, match="recursive=False isn't possible"):
        root.reset_iter_state(False)
    with pytest.raises(PolicyError, match="keep must be a Keep"):
        root.reset_iter_state(keep="accumulated")
    assert len(tree.asked) == 3


def test_without_a_tree_there_is_nothing_to_reset_and_no_state():
    module = Module()
    module.reset_iter_state()
    module.finish_accumulation()
    for ask in (lambda: module.hsdp_state, module.describe, lambda: existing_tree(module)):
        with pytest.raises(RuntimeError, match="the state exists from the root's first forward on"):
            ask()
    root, inner, _ = with_tree()
    for module in (root, inner):
        with pytest.raises(LookupError, match="the state was asked for"):
            _ = module.hsdp_state


def test_a_tree_without_parameters_has_nothing_to_finish():
    root, _, tree = with_tree()
    tree.groups = []
    root.finish_accumulation()
    assert tree.asked == []


# --------------------------------------------------------------------------------------------------- the layout of all


def test_groups_are_planned_together_each_as_it_was_set():
    mesh, other = MeshSpec.fsdp(4), MeshSpec.fsdp(2)
    a, b, c = (ParamSpec(name, (8, 4), "float32") for name in ("w", "inner.a", "inner.b"))
    bf16 = MixedPrecisionPolicy("bfloat16")
    root = GroupPlan(["(removed)", ""], [a], [Shard(1)], settings(), mesh)
    inner = GroupPlan(
        ["inner"], [b, c], [Replicate(), OnMesh(Shard(0), other)], Settings(2, bf16, ReductionPolicy("sum")), mesh
    )
    layout = plan_groups([root, inner], mesh, CPUOffloadPolicy())
    assert [unit.name for unit in layout.units] == ["", "inner"]  # a list with the root in it is the root's unit
    assert layout.offload == CPUOffloadPolicy()
    first, second = layout.units
    assert [m.dim for bucket in first.buckets for m in bucket.params.members] == [1]
    assert [bucket.mesh for bucket in second.buckets] == [mesh.as_replicated(), other]
    assert (first.reshard_after_forward, second.reshard_after_forward) == (False, 2)
    assert (second.mp_policy, second.reduction) == (bf16, ReductionPolicy("sum"))
    unfused = inner._replace(wanted=[Shard(0), Shard(0)], settings=settings(fused=False))
    assert len(plan_groups([root, unfused], mesh, OffloadPolicy()).units[1].buckets) == 2


def test_switching_off_one_way_with_unused_parameters_leaves_the_other_on():
    module = Module()
    group = module._hsdp_group
    module.set_reduce_scatter_unused_params(True)
    module.set_check_unused_params(False)
    assert group.settings.reduction.unused == "zeros"
    module.set_check_unused_params(True)
    module.set_reduce_scatter_unused_params(False)
    assert group.settings.reduction.unused == "checked"
    module.set_check_unused_params(False)
    assert group.settings.reduction.unused == "none"


def test_settings_mean_the_same_below_any_root():
    root, other = object(), object()
    a, b = Group(), Group()
    for group, module in ((a, root), (b, other)):
        group.modules, group.layout = [module], object()
    indices = {id(a): 0, id(b): 1}
    a.settings.forward_prefetch, b.settings.backward_prefetch = [b], [a]
    arrange([a, b], root, indices)
    assert (a.handling.reshard_after_forward, b.handling.reshard_after_forward) == (False, True)
    assert (a.handling.forward_prefetch, a.handling.backward_prefetch) == ((1,), None)
    assert b.handling.backward_prefetch == (0,)
    a.settings.reshard_after_forward = 2
    arrange([a, b], root, indices)
    assert a.handling.reshard_after_forward == 2
    b.layout = None  # without parameters: nothing to prefetch
    arrange([a, b], root, {id(a): 0})
    assert a.handling.forward_prefetch == ()
    b.layout = object()
    with pytest.raises(ValueError, match=r"must belong to the same root module; \['object'\] don't"):
        arrange([a, b], root, {id(a): 0})


def test_reducing_fully_is_over_at_the_end_also_of_an_error():
    ways = [Handling(Sync.NONE), Handling(Sync.SHARD)]
    with pytest.raises(KeyError), reducing_fully(ways):
        assert [way.sync for way in ways] == [Sync.FULL, Sync.FULL]
        raise KeyError
    assert [way.sync for way in ways] == [Sync.NONE, Sync.SHARD]
