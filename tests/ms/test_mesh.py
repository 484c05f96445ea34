"""Meshes of named axes over MindSpore's groups, joining the world, and the probes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import hsdp_fn_ms as hm
from hsdp_fn import BackendError, DataParallelMeshDims, MeshError, MeshSpec
from hsdp_fn_ms.probe import require_numpy
from tests.ms.pool import on_ranks


@on_ranks(4)
def test_axes_are_found_by_name_and_have_the_groups_of_their_ranks(rank, world):
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert (mesh.ndim, mesh.shape, mesh.size(), mesh.size("shard"), mesh.get_rank()) == (2, (2, 2), 4, 2, rank)
    assert mesh.get_coordinate() == [rank // 2, rank % 2]
    assert mesh.get_local_rank("shard") == rank % 2 and mesh.get_local_rank(0) == rank // 2
    rows = mesh["shard"]
    assert rows.mesh.tolist() == [2 * (rank // 2), 2 * (rank // 2) + 1]
    assert rows.get_group() == mesh.get_group("shard") == mesh.get_group(-1)
    assert mesh["replicate"].mesh.tolist() == [rank % 2, rank % 2 + 2]
    flat = mesh["replicate", "shard"].flatten("dp")
    assert flat.mesh.tolist() == [0, 1, 2, 3] and mesh["dp"] is flat and flat.get_local_rank() == rank
    assert mesh == hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) and hash(mesh)
    assert mesh != flat and "replicate" in repr(mesh)
    assert hm.mesh_spec(mesh) == MeshSpec.hsdp(2, 2)
    assert hm.mesh_spec(mesh, DataParallelMeshDims(shard="replicate")).shard_size == 2
    wide = hm.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(MeshError, match="name the data-parallel ones"):
        hm.mesh_spec(wide)
    spec = hm.mesh_spec(wide, DataParallelMeshDims(shard=("b", "c")))
    assert spec.group(rank, spec.shard) == (0, 1, 2, 3)
    backend = hm.MSBackend(wide, dp_mesh_dims=DataParallelMeshDims(shard=("b", "c")))
    assert backend.exchange(str(rank)) == {r: str(r) for r in range(4)}
    with pytest.raises(MeshError, match="must be in the order of the mesh"):
        hm.mesh_spec(wide, DataParallelMeshDims(shard=("c", "b")))
    with pytest.raises(MeshError, match="aren't axes"):
        hm.mesh_spec(wide, DataParallelMeshDims(shard="x"))
    part = hm.DeviceMesh("cpu", [0, 2], ("shard",))
    if rank in (0, 2):
        assert part.get_group() == mesh.get_group("replicate") if rank == 0 else part.get_local_rank() == 1
    else:
        assert part.get_coordinate() is None
        with pytest.raises(MeshError, match="isn't in the mesh"):
            part.get_group()
        with pytest.raises(MeshError, match="isn't in the mesh"):
            hm.MSBackend(part)


def test_a_process_alone_has_a_mesh_of_one_rank_and_wrong_meshes_are_refused():
    mesh = hm.init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    assert hm.MSBackend(mesh).exchange("me") == {0: "me"} and hm.MSBackend(mesh).votes(True) == 1
    with pytest.raises(BackendError, match="call init_process_group"):
        mesh.get_group()

    def refused(match: str, *args: object, **options: object) -> None:
        with pytest.raises(MeshError, match=match):
            hm.init_device_mesh(*args, **options)

    refused("the world has 1", "cpu", (2,))
    refused("must be a non-empty tuple", "cpu", ())
    refused("device_type must be one of", "cuda", (1,))
    refused("the mesh is for Ascend", "npu", (1,))
    refused("one unique name for each", "cpu", (1, 1), mesh_dim_names=("a", "a"))
    for ranks, match in (([], "non-empty"), ([0, 0], "different ranks"), ([1], "has rank 1")):
        with pytest.raises(MeshError, match=match):
            hm.DeviceMesh("cpu", ranks)
    two = hm.DeviceMesh("cpu", [[0]], ("a", "b"))
    for call, match in (
        (lambda: two.get_local_rank(), "say which"),
        (lambda: two["c"], "isn't an axis"),
        (lambda: two["b", "a"], "in the order"),
        (lambda: two.size(2), "out of range"),
        (lambda: two.flatten("a"), "already"),
    ):
        with pytest.raises(MeshError, match=match):
            call()


def test_joining_without_the_numbers_it_needs_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "MS_ROLE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="rank isn't given and RANK"):
        hm.init_process_group()
    with pytest.raises(ValueError, match=r"rank must be in 0 \.\. 1"):
        hm.init_process_group(rank=2, world_size=2)
    with pytest.raises(ValueError, match="MASTER_PORT"):
        hm.init_process_group(rank=0, world_size=2)
    with pytest.raises(ValueError, match="address must be ip:port"):
        hm.init_process_group(rank=0, world_size=2, address="nowhere")
    with pytest.raises(ValueError, match="timeout must be positive"):
        hm.init_process_group(rank=0, world_size=2, address="127.0.0.1:1", timeout=0)


def test_numpy_2_and_graph_mode_are_refused_with_the_way_out():
    with pytest.raises(BackendError, match=r"pip install 'numpy>=1\.25,<2'"):
        require_numpy("2.1.0")
    require_numpy("1.26.4")
    code = (
        "import mindspore as ms, hsdp_fn_ms as hm\n"
        "ms.set_context(mode=ms.GRAPH_MODE)\n"
        "try: hm.facts()\n"
        "except hm.backend.BackendError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"GLOG_v": "3"}, check=True
    )
    assert "PyNative mode only" in run.stdout


def test_resharded_units_are_freed_in_forward():
    """In a process of its own: memory that was freed is used again for the next unit."""
    code = """
import numpy as np
import hsdp_fn_ms as hm
from hsdp_fn_ms.binding import Binding
from mindspore import Tensor, nn, ops

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(64, 64, has_bias=False, weight_init="zeros") for _ in range(10)])
        self.head = nn.Dense(64, 1)

    def construct(self, x):
        for layer in self.layers:
            x = ops.relu(layer(x))
        return self.head(x)

addresses = []
install = Binding.install
Binding.install = lambda self, index, full: (addresses.append(full[0].data_ptr()), install(self, index, full))
net, mesh = Net(), hm.init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
state = hm.shard_cell(net, mesh, [f"layers.{i}" for i in range(10)], reshard_after_forward=WAY)
x = Tensor(np.ones((2, 64), np.float32))
hm.value_and_grad(lambda p, x: hm.functional_call(net, p, x).sum())(state, x)
print((max(addresses) - min(addresses)) // 16_384)  # of so many parameters' memory
"""
    counts = []
    for way in ("True", "False"):
        run = subprocess.run(
            [sys.executable, "-c", code.replace("WAY", way)],
            capture_output=True,
            text=True,
            env=os.environ | {"GLOG_v": "3"},
        )
        assert run.returncode == 0, run.stderr
        counts.append(int(run.stdout))
    assert counts[0] <= 5 and counts[1] >= 9, counts
