"""A unit with its own communication: an all-gather and a reduce-scatter that send 16-bit numbers and count bytes.

    torchrun --nproc-per-node 2 examples/torch/custom_comm.py

The objects are written as for FSDP2 (`torch.distributed.fsdp`): ``allocate`` and ``__call__``. They are used on one
unit, the large one; the others keep the default collectives. Prints the bytes that the unit sent, and the losses.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hsdp_fn_torch.facade import fully_shard


class Counter:
    """Memory for the collectives, and how many bytes this rank has sent, against those without compression."""

    def __init__(self) -> None:
        self.sent = self.plain = 0

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called for the output of each collective, and for the reduce-scatter's input."""
        return torch.empty(*size, dtype=dtype, device=device)

    def count(self, compressed: Tensor, plain: Tensor, messages: int) -> None:
        """``messages`` tensors like ``compressed`` go out instead of ``plain`` ones."""
        self.sent += messages * compressed.numel() * compressed.element_size()
        self.plain += messages * compressed.numel() * plain.element_size()


class HalfAllGather(Counter):
    """Parameters travel as bfloat16 and arrive in the unit's own dtype."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False):
        """Fill the output with all ranks' inputs; returns a handle, so that the next unit's gather runs beside it."""
        shard = input_tensor.bfloat16()
        gathered = torch.empty(output_tensor.shape, dtype=torch.bfloat16, device=output_tensor.device)
        self.count(shard, input_tensor, group.size() - 1)
        work = dist.all_gather_single(gathered, shard, group=group, async_op=True)
        handle = Decompress(work, gathered, output_tensor)
        return handle if async_op else handle.wait()


class Decompress:
    """Waits for a collective and widens its result."""

    def __init__(self, work: dist.Work, source: Tensor, target: Tensor) -> None:
        self.work, self.source, self.target = work, source, target

    def wait(self) -> None:
        """Called before the parameters are used."""
        self.work.wait()
        self.target.copy_(self.source)


class HalfReduceScatter(Counter):
    """Gradients travel as bfloat16, but are added in float32: every rank sends slices, and sums what it receives."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op, async_op: bool = False
    ) -> None:
        """Sum each rank's slice of all ranks' inputs. Returns None: it has ended."""
        assert op == dist.ReduceOp.SUM, "the mean is made afterwards"
        slices = input_tensor.bfloat16()
        received = torch.empty_like(slices)
        self.count(slices.chunk(group.size())[0], input_tensor, group.size() - 1)
        dist.all_to_all_single(received, slices, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, dtype=output_tensor.dtype, out=output_tensor)


def main() -> None:
    """Train a small network for a few steps."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    gather, scatter = HalfAllGather(), HalfReduceScatter()
    model[2].set_custom_all_gather(gather)
    model[2].set_custom_reduce_scatter(scatter)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)
    for step in range(20):
        x = torch.randn(64, 16)
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 5 in (0, 4):
            print(f"step {step:2d}  loss {mean.item():.4f}")
    if rank == 0:
        for name, comm in (("all-gather", gather), ("reduce-scatter", scatter)):
            print(f"{name}: sent {comm.sent / 1e3:.1f} kB instead of {comm.plain / 1e3:.1f} kB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
