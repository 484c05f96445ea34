"""Two gloo processes that train the same model in every way in turn, and what comes out of their clocks."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from .contenders import FACADE, FLOOR, FSDP2, OURS, PREFETCH, Batch, Contender, contenders, rotated
from .observe import Observer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "torch"))
from gpt import GPT, GPTConfig, loss_fn

WORLD = 2
VOCAB = 256


@dataclass(frozen=True, slots=True)
class Size:
    """A model and a batch.

    Attributes:
        name: for people.
        config: the shape of the model.
        batch: sequences of ``config.seq_len`` tokens on each rank.
        steps: timed steps of each contender.
        warmup: steps before these.
    """

    name: str
    config: GPTConfig
    batch: int
    steps: int
    warmup: int = 2


SIZES = {
    "overhead": Size("overhead", GPTConfig(dim=64, layers=12, heads=4, seq_len=16), batch=1, steps=60, warmup=5),
    "compute": Size("compute", GPTConfig(dim=512, layers=12, heads=8, seq_len=128, ffn_multiple=3.1), batch=2, steps=8),
    "wide": Size("wide", GPTConfig(dim=1024, layers=4, heads=8, seq_len=128), batch=2, steps=6),
}


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of one step on one rank. CPU time is of all threads of the process."""

    wall: float
    cpu: float
    update_wall: float
    update_cpu: float


@dataclass(frozen=True, slots=True)
class Record:
    """One contender on one rank."""

    clocks: list[Clock]
    losses: list[float]
    peak: int
    at_rest: int
    collectives: dict[str, int]


def compare(size: Size) -> dict[str, Any]:
    """Run all contenders on `WORLD` processes of one thread each, and reduce what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(size, folder), nprocs=WORLD)
        ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]
    return summary(size, ranks)


def summary(size: Size, ranks: Sequence[dict[str, Record]]) -> dict[str, Any]:
    """Ratios and absolute values. A step's wall time is that of its slower rank, its CPU time the ranks' mean."""
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    whole_wall: dict[str, list[float]] = {}
    whole_cpu: dict[str, list[float]] = {}
    for name in ranks[0]:
        steps = list(zip(*(rank[name].clocks for rank in ranks), strict=True))
        wall[name] = [max(c.wall for c in step) for step in steps]
        cpu[name] = [sum(c.cpu for c in step) / len(step) for step in steps]
        whole_wall[name] = [max(c.wall + c.update_wall for c in step) for step in steps]
        whole_cpu[name] = [sum(c.cpu + c.update_cpu for c in step) / len(step) for step in steps]
    first = ranks[0]
    return {
        "cpu_ratio": _ratio(cpu, OURS, FSDP2),
        "wall_ratio": _ratio(wall, OURS, FSDP2),
        "wall_over_floor": _ratio(wall, OURS, FLOOR),
        "peak_bytes_ratio": first[OURS].peak / first[FSDP2].peak,
        "cpu_ratio_to_prefetch": _ratio(cpu, OURS, PREFETCH),
        "wall_ratio_to_prefetch": _ratio(wall, OURS, PREFETCH),
        "fsdp2_wall_over_floor": _ratio(wall, FSDP2, FLOOR),
        "fsdp2_prefetch_wall_over_floor": _ratio(wall, PREFETCH, FLOOR),
        "cpu_ratio_with_optimizer": _ratio(whole_cpu, OURS, FSDP2),
        "wall_ratio_with_optimizer": _ratio(whole_wall, OURS, FSDP2),
        "facade": {
            "cpu_ratio": _ratio(cpu, FACADE, FSDP2),
            "wall_ratio": _ratio(wall, FACADE, FSDP2),
            "wall_over_floor": _ratio(wall, FACADE, FLOOR),
            "peak_bytes_ratio": first[FACADE].peak / first[FSDP2].peak,
            "cpu_ratio_with_optimizer": _ratio(whole_cpu, FACADE, FSDP2),
            "wall_ratio_with_optimizer": _ratio(whole_wall, FACADE, FSDP2),
            "cpu_ratio_to_ours": _ratio(cpu, FACADE, OURS),
            "wall_ratio_to_ours": _ratio(wall, FACADE, OURS),
            "cpu_ratio_to_ours_with_optimizer": _ratio(whole_cpu, FACADE, OURS),
            "wall_ratio_to_ours_with_optimizer": _ratio(whole_wall, FACADE, OURS),
        },
        "losses_equal": all(
            rank[who].losses == rank[OURS].losses for rank in ranks for who in (FACADE, FSDP2, PREFETCH)
        ),
        "collectives_equal": all(
            rank[who].collectives == rank[FSDP2].collectives for rank in ranks for who in (OURS, FACADE)
        ),
        "parameters": parameters(size),
        "steps": size.steps,
        "size": {**asdict(size.config), "batch": size.batch},
        "contenders": {
            name: {
                "cpu_ms": median(cpu[name]) * 1e3,
                "wall_ms": median(wall[name]) * 1e3,
                "cpu_ms_with_optimizer": median(whole_cpu[name]) * 1e3,
                "wall_ms_with_optimizer": median(whole_wall[name]) * 1e3,
                "peak_bytes": record.peak,
                "bytes_at_rest": record.at_rest,
                "collectives": record.collectives,
                "last_loss": record.losses[-1],
            }
            for name, record in first.items()
        },
    }


def _ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Median over the steps of the ratio within a step, so that a slow stretch of the machine touches both."""
    return median(a / b for a, b in zip(times[one], times[other], strict=True))


def parameters(size: Size) -> int:
    """Elements of the whole model."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(size.config).parameters())


def batch_of(size: Size, step: int, rank: int) -> Batch:
    """The same tokens for every contender: int64 inputs and targets ``[batch, seq_len]``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCAB, (size.batch, size.config.seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def model_of(size: Size) -> nn.Module:
    """The same weights on every rank."""
    model = GPT(size.config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def _worker(rank: int, size: Size, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        units = [f"layers.{i}" for i in range(size.config.layers)]
        records = _race(size, rank, contenders(model_of(size), units, mesh, loss_fn))
        torch.save(records, Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _race(size: Size, rank: int, field: Sequence[Contender]) -> dict[str, Record]:
    clocks: dict[str, list[Clock]] = {c.name: [] for c in field}
    losses: dict[str, list[float]] = {c.name: [] for c in field}
    for step in range(size.warmup + size.steps):
        if step == size.warmup:
            gc.collect()
            gc.freeze()
        batch = batch_of(size, step, rank)
        for contender in rotated(field, step):
            clock, loss = _timed(contender, batch)
            losses[contender.name].append(loss)
            if step >= size.warmup:
                clocks[contender.name].append(clock)
    gc.unfreeze()
    records = {}
    batch = batch_of(size, size.warmup + size.steps, rank)
    for contender in field:
        peak, collectives = _observed(contender, batch)
        at_rest = sum(t.nbytes for t in contender.at_rest())
        name = contender.name
        records[name] = Record(clocks[name], losses[name], peak, at_rest, collectives)
    return records


def _timed(contender: Contender, batch: Batch) -> tuple[Clock, float]:
    """One step that all ranks begin together."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = contender.gradients(batch)
    wall_between, cpu_between = time.perf_counter(), time.process_time()
    contender.update()
    wall_end, cpu_end = time.perf_counter(), time.process_time()
    clock = Clock(wall_between - wall, cpu_between - cpu, wall_end - wall_between, cpu_end - cpu_between)
    return clock, loss.item()


def _observed(contender: Contender, batch: Batch) -> tuple[int, dict[str, int]]:
    """Peak bytes of one step's forward and backward, and its collectives."""
    gc.collect()
    with Observer(contender.at_rest()) as observer:
        contender.gradients(batch)
    contender.update()
    return observer.peak, dict(observer.collectives)
