"""Train a small GPT on the Python standard library's sources with hsdp_fn_ms.

    python examples/mindspore/train_gpt.py --processes 2 --api facade
    msrun --worker_num=2 --local_worker_num=2 examples/mindspore/train_gpt.py
    python examples/mindspore/train_gpt.py --steps 40 --save run --save-every 20
    python examples/mindspore/train_gpt.py --steps 80 --save run --resume run --processes 4

``--api`` chooses between the functional API and `fully_shard`; how they differ is all in `trainers.py`. Run with
``mccl`` on CPU; never on Ascend. Started plainly it starts ``--processes`` processes of itself.
"""

import argparse
import os
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from gpt import GPT, GPTConfig, init_weights
from mindspore import Tensor
from trainers import TRAINERS

import hsdp_fn_ms as hm
from hsdp_fn import HSDPState, Sync, describe, expected_comm, memory_bytes, microbatches, totals

CORPUS_BYTES = 400_000
VALID_WINDOWS = 16


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--processes", type=int, default=2, help="processes to start when not started by msrun (default %(default)s)")
    add("--api", choices=tuple(TRAINERS), default="functional")
    add("--replicate", type=int, default=1, help="replicas: HSDP where it is above 1 (default %(default)s)")
    add("--steps", type=int, default=40)
    add("--batch-size", type=int, default=4, help="windows of one process and microbatch (default %(default)s)")
    add("--microbatches", type=int, default=1)
    add("--hold", choices=("none", "shard"), default="none", help="how microbatches before the last are kept")
    add("--learning-rate", type=float, default=3e-3)
    add("--max-norm", type=float, default=1.0)
    add("--dim", type=int, default=GPTConfig.dim)
    add("--layers", type=int, default=GPTConfig.layers)
    add("--heads", type=int, default=GPTConfig.heads)
    add("--seq-len", type=int, default=GPTConfig.seq_len)
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=10)
    add("--save", type=Path, metavar="DIR", help="write checkpoints to DIR/step-000040 and so on, one at the end")
    add("--save-every", type=int, metavar="STEPS", help="and one every so many steps")
    add("--resume", type=Path, metavar="DIR", help="go on from the newest one in DIR, on any number of processes")
    options = parser.parse_args(arguments)
    for name in ("processes", "replicate", "steps", "batch_size", "microbatches", "log_every", "save_every"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.save_every and not options.save:
        parser.error("--save-every needs --save DIR")
    if options.resume and not checkpoints(options.resume):
        parser.error(f"--resume: there is no checkpoint in {options.resume}")
    try:
        options.config = GPTConfig(options.dim, options.layers, options.heads, options.seq_len)
    except ValueError as error:
        parser.error(str(error))
    return options


def checkpoints(directory: Path) -> list[Path]:
    """Those in a directory, oldest first."""
    return sorted(directory.glob("step-*"))


def start_processes(count: int) -> int:
    """This program once a rank. Returns the first exit code that isn't 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(count):
        where = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in where.items()}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    codes = [process.wait() for process in ranks]
    return next((code for code in codes if code), 0)


def load_corpus() -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes, of different files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train = b"".join(path.read_bytes() for i, path in enumerate(files) if i % 20)[:CORPUS_BYTES]
    valid = b"".join(path.read_bytes() for i, path in enumerate(files) if not i % 20)[: CORPUS_BYTES // 10]
    return np.frombuffer(train, np.uint8), np.frombuffer(valid, np.uint8)


def windows(text: np.ndarray, count: int, seq_len: int, *seed: int) -> tuple[Tensor, Tensor]:
    """Random windows and the byte that follows each place: int32 ``[count, seq_len]`` each."""
    starts = np.random.default_rng(seed).integers(0, len(text) - seq_len - 1, count)
    rows = np.stack([text[s : s + seq_len + 1] for s in starts]).astype(np.int32)
    return Tensor(np.ascontiguousarray(rows[:, :-1])), Tensor(np.ascontiguousarray(rows[:, 1:]))


def name_of(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"step-{step:06}"


def mean_over_ranks(state: HSDPState, value: float) -> float:
    """Communicates: one short message a rank."""
    values = [float(text) for text in state.backend.exchange(repr(value)).values()]
    return sum(values) / len(values)


def run(options: argparse.Namespace) -> int:
    """Train, and compare what was communicated with the prediction. Returns the exit code."""
    if hm.facts().device == "CPU":  # each operator in the calling thread: many times faster on few cores
        ms.runtime.launch_blocking()
    rank, world = hm.init_process_group()
    if world % options.replicate:
        raise SystemExit(f"--replicate {options.replicate} doesn't divide {world} processes")
    shape = (world,) if options.replicate == 1 else (options.replicate, world // options.replicate)
    mesh = hm.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = GPT(options.config)
    init_weights(model, options.seed)
    trainer = TRAINERS[options.api](model, mesh, options)
    train, valid = load_corpus()
    if options.resume:
        newest = checkpoints(options.resume)[-1]
        options.seed = trainer.load(newest).extra["seed"]  # of the data, so that they go on where they were
    began_at = trainer.state.step
    if options.save and (later := [path for path in checkpoints(options.save) if path.name > name_of(began_at)]):
        raise SystemExit(f"--save: {later[-1]} is ahead of step {began_at}; give another directory or --resume this")
    if rank == 0:
        print(describe(trainer.state), flush=True)
        if options.resume:
            print(f"goes on from {newest}", flush=True)
    predicted = [
        c
        for sync in microbatches(options.microbatches, hold=Sync(options.hold))
        for c in expected_comm(trainer.state.layout, sync=sync)
    ]
    losses, equal, began = [], True, time.perf_counter()
    for i in range(began_at, options.steps):
        loss, norm, issued = trainer.step(
            [
                windows(train, options.batch_size, options.seq_len, options.seed, i, micro, rank)
                for micro in range(options.microbatches)
            ]
        )
        equal = equal and issued == predicted
        losses.append(float(loss.asnumpy()))
        if (i + 1) % options.log_every == 0 or i + 1 == options.steps:
            recent = mean_over_ranks(trainer.state, float(np.mean(losses)))
            held_out = trainer.judge(windows(valid, VALID_WINDOWS, options.seq_len, options.seed, rank))
            judged = mean_over_ranks(trainer.state, float(held_out.asnumpy()))
            if rank == 0:
                seconds = (time.perf_counter() - began) / len(losses)
                print(
                    f"step {i + 1:>4}  train {recent:.3f}  held out {judged:.3f} nats a byte  gradient norm "
                    f"{float(norm.asnumpy()):.2f}  {seconds:.2f} s a step",
                    flush=True,
                )
            losses, began = [], time.perf_counter()
        if options.save and (i + 1 == options.steps or (options.save_every and (i + 1) % options.save_every == 0)):
            trainer.save(options.save / name_of(i + 1), {"seed": options.seed})
    if rank == 0:
        for op, total in totals(predicted).items():
            print(f"a step issues {total.count} {op}, {total.nbytes:,} bytes")
        print(f"at rest this process holds {memory_bytes(trainer.state)['total']:,} bytes of parameters")
    if not equal:
        print(f"process {rank}: the collectives differ from the prediction", file=sys.stderr)
    return 0 if equal else 1


def main(arguments: list[str] | None = None) -> int:
    """Command line to exit code."""
    options = parse(arguments)
    if "RANK" not in os.environ and "MS_ROLE" not in os.environ:
        return start_processes(options.processes)
    hm.leave(run(options))


if __name__ == "__main__":
    sys.exit(main())
