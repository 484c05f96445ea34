"""What facades share beside setters: arguments, extended classes, agreement of ranks."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest

from hsdp_fn import (
    CPUOffloadPolicy,
    Layout,
    MeshError,
    MeshSpec,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamSpec,
    PolicyError,
    RankMismatchError,
    plan_layout,
)
from hsdp_fn.agreement import agree
from hsdp_fn.arguments import mesh_dims_of, modules_of, mp_policy_of, offload_policy_of, parameters_of
from hsdp_fn.extending import extended_class, original_class

# ---------------------------------------------------------------------------------------------------------- arguments


class Plain:
    pass


class Taken(Plain):
    pass


def modules(given: object) -> list[Plain]:
    return modules_of(given, "fully_shard", Plain, Taken, lambda m: hasattr(m, "holds"))


def test_one_module_or_a_list_of_them():
    a, b = Plain(), Plain()
    assert modules(a) == [a]
    assert modules([a, b]) == [a, b]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (3, ValueError, "fully_shard takes a module or a list of modules, found int$"),
        ([Plain(), 3], ValueError, "found int at index 1"),
        ([], ValueError, "fully_shard got an empty list of modules"),
        ([Taken()], AssertionError, "applied to this module before"),
        ([Plain()] * 2, ValueError, "twice in one list"),
    ],
)
def test_what_is_no_module_to_shard(given, error, text):
    with pytest.raises(error, match=text):
        modules(given)


def test_a_container_without_a_forward_is_refused():
    container = Plain()
    container.holds = True
    with pytest.raises(ValueError, match="containers that do not implement forward"):
        modules(container)


def test_lists_of_parameters():
    assert parameters_of("ignored_params", None, int, str) == []
    assert parameters_of("ignored_params", iter([1, 2]), int, str) == [1, 2]
    with pytest.raises(TypeError, match="ignored_params must be a set or list of parameters, found a tensor"):
        parameters_of("ignored_params", "12", int, str)
    with pytest.raises(TypeError, match="ignored_params must hold parameters, found float"):
        parameters_of("ignored_params", [1, 2.0], int, str)


def test_policies_of_other_libraries_are_taken_by_their_fields():
    def theirs(name: str, **fields: object) -> object:
        return type(name, (), fields)()

    dtypes = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": None, "cast_forward_inputs": False}
    assert mp_policy_of(theirs("MixedPrecisionPolicy", **dtypes)) == MixedPrecisionPolicy(**dtypes)
    main = mp_policy_of(theirs("MixedPrecisionPolicy", **dtypes, apply_grad_on_fp32_main_grad=True))
    assert main == MixedPrecisionPolicy(**dtypes, apply_grad_on_fp32_main_grad=True)
    assert mp_policy_of(None) == MixedPrecisionPolicy()
    assert offload_policy_of(theirs("CPUOffloadPolicy", pin_memory=False)) == CPUOffloadPolicy(False)
    assert type(offload_policy_of(theirs("OffloadPolicy"))) is type(offload_policy_of(None)) is OffloadPolicy
    dims = mesh_dims_of(theirs("DataParallelMeshDims", shard="s", replicate="r"))
    assert dims is mesh_dims_of(dims)
    assert (dims.shard, dims.replicate, mesh_dims_of(None)) == ("s", "r", None)
    with pytest.raises(PolicyError, match="mp_policy must be a MixedPrecisionPolicy, found 'bf16'"):
        mp_policy_of("bf16")
    with pytest.raises(PolicyError, match="offload_policy must be an OffloadPolicy of hsdp_fn, found True"):
        offload_policy_of(True)
    with pytest.raises(MeshError, match="dp_mesh_dims must be a DataParallelMeshDims of hsdp_fn, found 'dp'"):
        mesh_dims_of("dp")


# --------------------------------------------------------------------------------------------------- extended classes


class Base:
    def __new__(cls, *args: Any) -> Any:
        return original_class(cls, Base)(*args)


class Wider(Base):
    pass


class Original:
    def __init__(self, value: int) -> None:
        self.value = value


class Derived(Original):
    pass


@pytest.mark.parametrize("base", [Base, Wider])
@pytest.mark.parametrize("original", [Original, Derived])
def test_an_extended_class_constructs_its_original(base, original):
    extended = extended_class(original, base, "HSDP")
    assert (extended.__name__, extended.__bases__, extended.__module__) == (
        f"HSDP{original.__name__}",
        (base, original),
        __name__,
    )
    assert extended_class(original, base, "HSDP") is extended
    assert (type(extended(3)), extended(3).value) == (original, 3)
    assert type(type("Further", (extended,), {})(4)) is original


def test_two_bases_extend_one_class_side_by_side():
    assert extended_class(Original, Base, "HSDP") is not extended_class(Original, Wider, "Replicate")


def test_a_base_alone_is_not_constructed():
    with pytest.raises(TypeError, match=r"Wider isn't constructed"):
        Wider()


def test_extended_classes_go_with_their_originals():
    original = type("Local", (), {})
    gone = [weakref.ref(original), weakref.ref(extended_class(original, Base, "HSDP"))]
    del original
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# ---------------------------------------------------------------------------------------------------------- agreement


class Ranks:
    """One of the ranks, which hears what the others would say."""

    def __init__(self, rank: int, others: dict[int, str]) -> None:
        self.rank, self.others = rank, others

    def exchange(self, message: str) -> dict[int, str]:
        return dict(sorted({**self.others, self.rank: message}.items()))


def layout_of(*names: str) -> Layout:
    return plan_layout([ParamSpec(f"{name}.w", (4,), "float32") for name in names], MeshSpec.fsdp(2), names)


def test_ranks_with_one_layout_and_the_same_weights_agree_silently():
    layout = layout_of("a", "b")
    mesh = layout.mesh
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(Ranks(0, {1: f"{layout.digest} x,y"}), layout, [[(mesh, "x")], [(mesh, "y")]])
        agree(Ranks(0, {1: f"{layout.digest} ,y"}), layout, [[(mesh, "x")], [(mesh, "y")]])  # has loaded some


def test_another_layout_is_an_error():
    layout, other = layout_of("a", "b"), layout_of("a")
    with pytest.raises(RankMismatchError, match="ranks have sharded different models or policies") as caught:
        agree(Ranks(0, {1: f"{other.digest} x"}), layout, [[(layout.mesh, "x")], [(layout.mesh, "y")]])
    assert layout.digest in str(caught.value)
    assert other.digest in str(caught.value)


def test_units_whose_weights_differed_are_named_where_the_caller_says():
    layout = layout_of("a", "b")
    with pytest.warns(UserWarning, match=r"different weights when units \['b'\] were sharded") as caught:
        agree(
            Ranks(1, {0: f"{layout.digest} x,z"}),
            layout,
            [[(layout.mesh, "x")], [(layout.mesh, "y")]],
            stacklevel=2,
        )
    assert caught[0].filename == __file__


def test_weights_are_compared_among_the_ranks_that_share_them():
    """As experts are that each rank has for itself."""
    layout = layout_of("a")
    alone = MeshSpec.fsdp(1)  # rank 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(Ranks(0, {1: f"{layout.digest} z,y"}), layout, [[(alone, "x"), (layout.mesh, "y")]])
