"""What once went wrong with several meshes: norms that not all ranks took part in, groups that outlived their world,
orders of ranks, copies that were edited.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hsdp_fn_torch as ht
from hsdp_fn import MeshError, MeshSpec, OnMesh, RankMismatchError, Shard, UnitSpec
from hsdp_fn_torch import FSDPMeshInfo, ShardPlacementResult, clip_grad_norm_, fully_shard
from hsdp_fn_torch.mesh import process_group
from tests.workers_meshes import groups, mesh_of
from tests.workers_torch import on_ranks


class Routed(nn.Module):
    """A dense layer, and an expert that only the first expert-parallel rank gets tokens for, if ``uneven``."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.uneven = False

    def forward(self, x):
        y = self.dense(x)
        return y if self.uneven and dist.get_rank() % 2 else y + self.expert(y)


def routed(rank, *, own_unit):
    torch.manual_seed(rank % 2)  # other experts on the other expert-parallel rank
    model, edp = Routed(), mesh_of(edp=2, ep=2)["edp"]
    torch.manual_seed(7)
    nn.init.normal_(model.dense.weight)
    if own_unit:
        fully_shard(model.expert, mesh=edp)
        return fully_shard(model, mesh=mesh_of(dp=4))
    expert, info = model.expert.weight, FSDPMeshInfo(edp, shard_mesh_dim=0)
    return fully_shard(
        model,
        mesh=mesh_of(dp=4),
        shard_placement_fn=lambda p: ShardPlacementResult(None, info) if p is expert else None,
    )


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("own_unit", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_ranks(4)
def test_a_norm_is_of_all_experts_whoever_has_gradients(rank, world, norm_type, own_unit, uneven):
    """Every rank takes part, though some have no gradient of an expert, and all find the same."""
    model = routed(rank, own_unit=own_unit)
    model.uneven = uneven
    torch.manual_seed(20 + rank)
    model(torch.randn(3, 4)).square().mean().backward()
    grads = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
    mine = torch.zeros(4, 4) if grads["expert.weight"] is None else grads["expert.weight"]
    assert (grads["expert.weight"] is None) == (uneven and rank % 2 == 1)
    both = [torch.empty(4, 4) for _ in range(world)]
    dist.all_gather(both, mine)
    expected = torch.linalg.vector_norm(torch.stack([grads["dense.weight"], both[0], both[1]]), norm_type)
    norm = clip_grad_norm_(model.parameters(), 0.5, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        model.dense.weight.grad.full_tensor(), grads["dense.weight"] * 0.5 / expected, rtol=1e-4, atol=1e-6
    )


@on_ranks(4)
def test_ranks_that_fall_along_a_shard_axis_are_refused_by_parameter(rank, world):
    """Process groups sort their ranks: rows would come back in another order."""
    falling = MeshSpec((4,), ("e",), shard=("e",), ranks=(3, 2, 1, 0))
    for units, policies in (
        (["1"], {"placement_fn": lambda p: OnMesh(Shard(0), falling) if p.name == "1.weight" else None}),
        ([UnitSpec("1", mesh=falling)], {}),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises((MeshError, RankMismatchError), match=r"'1\.weight'.*rise along the shard axes"):
            ht.shard_module(model, mesh_of(dp=4), units, **policies)
        assert not model[1].weight.is_meta


@on_ranks(4)
def test_planning_on_one_rank_doesnt_change_whose_groups_are_used(rank, world):
    if rank == 0:
        ht.plan_module(nn.Linear(4, 4), init_planned())
    else:
        init_planned()
    before = process_group("cpu", (0, 1) if rank < 2 else (2, 3))
    gathered = [None, None]
    dist.all_gather_object(gathered, rank, group=before)
    assert gathered == ([0, 1] if rank < 2 else [2, 3])


def init_planned():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("planned_replicate", "planned_shard"))


@on_ranks(4)
def test_a_mesh_without_this_rank_is_refused_by_parameter(rank, world):
    model = nn.Linear(4, 4)
    info = FSDPMeshInfo(_only(), shard_mesh_dim=0)
    if rank % 2 == 0:
        with pytest.raises(MeshError, match=r"'weight'.*without this one"):
            fully_shard(model, mesh=mesh_of(dp=4), shard_placement_fn=lambda p: ShardPlacementResult(None, info))
        assert type(model) is nn.Linear and type(model.weight) is nn.Parameter
    dist.barrier()


def _only():
    """The ranks 1 and 3, on every rank."""
    return DeviceMesh("cpu", [1, 3], mesh_dim_names=("e",))


@on_ranks(4)
def test_a_refused_call_flattens_no_axes(rank, world):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("u", "v", "w"))
    before = groups()
    with pytest.raises(MeshError, match=r"'weight' is a plain tensor.*'w'"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=ht.DataParallelMeshDims(shard=("u", "v")))
    assert not mesh._flatten_mapping and groups() == before


@pytest.mark.parametrize("local", [False, True])
@on_ranks(4)
def test_an_edit_of_a_piece_is_told_also_of_its_local_tensor(rank, world, local):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh_of(dp=4), reshard_after_forward=2)
    fully_shard(model, mesh=mesh_of(dp=4))
    out = model(torch.ones(1, 4)).sum()
    weight = model[0].weight
    assert isinstance(weight, DTensor) and weight.device_mesh.size() == 2
    list(model.parameters())  # looking changes nothing
    with torch.no_grad():
        (weight.to_local() if local else weight).mul_(0.5)
    with pytest.raises(RuntimeError, match="edited in place"):
        out.backward()
    model.reset_iter_state()


@on_ranks(4)
def test_an_evaluation_leaves_nothing_behind(rank, world):
    """No backward will gather over the groups, and what stands in the modules is what training goes on with."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh_of(dp=4), reshard_after_forward=2)
    fully_shard(model, mesh=mesh_of(dp=4), reshard_after_forward=True)
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert all(u.full is None for u in model.hsdp_state.units)
    assert model[0][0].weight is next(iter(model.parameters()))
    model[0][0].weight.requires_grad_(False)  # by the plain child, which knows nothing of us
    model(torch.ones(1, 4)).sum().backward()
    assert model[0][0].weight.grad is None and model[1].weight.grad is not None


def test_groups_dont_outlive_their_world(tmp_path):
    """In a process of its own: the worker's world stays."""
    done = subprocess.run([sys.executable, "-c", _CYCLES, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["2", "2", "2"], done.stdout


_CYCLES = """
import gc, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from hsdp_fn_torch import fully_shard
from hsdp_fn_torch.mesh import _GROUPS

def once(i):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{i}", rank=0, world_size=1)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()

for i in range(5):
    once(i)
    gc.collect()
    if i > 1:
        print(min(len(_GROUPS), 9))
"""
