"""Train a small GPT with hsdp-fn: the project's main example. ``--help`` lists what can be varied.

    torchrun --standalone --nproc_per_node=2 examples/torch/train_gpt.py

``--api`` chooses between the functional API and `fully_shard`; how they differ is all in `trainers.py`. Everything that
one process can refuse is refused before the processes meet.
"""

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import Checkpoints, History, Saved
from gpt import GPT, GPTConfig, generate
from options import Options, Refused, World, check_device, parse, say
from report import PeakMemory, Progress, Result, draw_curve, mean_over_ranks, memory_lines
from text import Batches, Corpus, load_corpus, unigram_entropy, validation_batches
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint
from trainers import TRAINERS, Trainer

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
VALID_BATCH = 16  # windows of one forward, at most


@dataclass(frozen=True, slots=True)
class Job:
    """A run that has passed every check: what to do, on what, from where. `saved` is None for a fresh start."""

    options: Options
    world: World
    config: GPTConfig
    corpus: Corpus
    batches: Batches
    checkpoints: Checkpoints
    saved: Saved | None


def prepare(options: Options, world: World) -> Job:
    """Check everything that one process can check by itself.

    Raises:
        Refused: in one line, what is wrong and what would do.
    """
    check_device(options, world)
    try:
        config = GPTConfig(options.dim, options.layers, options.heads, options.seq_len)
        corpus = _corpus(options.corpus_bytes)
        batches = Batches(corpus.train, options.seq_len, options.batch_size, options.seed, options.microbatches)
        validation_batches(corpus.valid, options.seq_len, 1, 1, 0, 1)
    except ValueError as error:
        raise Refused(str(error)) from error
    digest = hashlib.sha256(corpus.train.tobytes() + corpus.valid.tobytes()).hexdigest()[:16]
    checkpoints = Checkpoints(options.out, options, digest, world)
    saved = checkpoints.read() if options.resume else None
    if saved is not None and options.stop_after is not None and options.stop_after <= saved.step:
        raise Refused(f"--stop-after {options.stop_after}: the checkpoint is of step {saved.step} already")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {options.out} can't be made: {error.strerror}") from error
    if not os.access(options.out, os.W_OK):
        raise Refused(f"--out {options.out} isn't writable")
    return Job(options, world, config, corpus, batches, checkpoints, saved)


def _corpus(limit: int | None) -> Corpus:
    try:
        return load_corpus(limit=limit)
    except ValueError as error:
        raise Refused(f"--corpus-bytes {limit}: {error}") from error


def meet(job: Job) -> DeviceMesh:
    """Join the other processes. Communicates: a rendezvous, and one for each mesh axis."""
    kind = job.options.device
    if kind != "cpu":
        torch.get_device_module(kind).set_device(job.world.local_rank)
    where: dict[str, Any] = {}
    if not job.world.launched:  # started without torchrun: a world of one that needs no address
        where = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(COLLECTIVES[kind], timeout=timedelta(minutes=10), **where)
    replicate, shard = job.options.mesh
    if replicate == 1:
        return init_device_mesh(kind, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicate, shard), mesh_dim_names=("replicate", "shard"))


def build(job: Job, mesh: DeviceMesh, device: torch.device) -> Trainer:
    """The trainer, at step 0 or where the checkpoint was. Communicates: see `shard_module` and `fully_shard`."""
    options = job.options
    model = GPT(job.config)
    model.init_weights(torch.Generator().manual_seed(options.seed))  # the same on every process
    model.to(device)
    if options.checkpoint_activations != "none":
        reentrant = options.checkpoint_activations == "reentrant"
        for block in model.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    return TRAINERS[options.api](model, mesh, options, job.saved)


def held_out(job: Job) -> list[tuple[Tensor, Tensor]]:
    """This process's batches of held-out windows, equally many on each."""
    rank, world = job.world.rank, job.world.size
    share = -(-job.options.valid_windows // world)
    batch = min(VALID_BATCH, share)
    windows = -(-share // batch) * batch * world
    return list(validation_batches(job.corpus.valid, job.options.seq_len, windows, batch, rank, world))


def validate(trainer: Trainer, batches: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> float:
    """Mean loss of the held-out windows. Communicates: one forward's gathers a batch, and one exchange."""
    total = torch.zeros((), device=device)
    for x, y in batches:
        total += trainer.loss(x.to(device), y.to(device))
    return mean_over_ranks([total / len(batches)])[0]


def sample(job: Job, trainer: Trainer, device: torch.device) -> bytes:
    """Text after ``--prompt``, the same on all processes. Communicates: one forward's gathers for each byte."""
    options = job.options
    generator = torch.Generator(device).manual_seed(options.seed)
    return generate(
        trainer.logits,
        options.prompt.encode(),
        options.sample_bytes,
        options.temperature,
        generator,
        seq_len=options.seq_len,
    )


def train(job: Job, trainer: Trainer, device: torch.device, history: History) -> tuple[float, PeakMemory | None]:
    """All steps to the end, or to ``--stop-after``; `history` grows on the way.

    Returns:
        The seconds of the steps alone, and the memory of the last step of the run.
    """
    options, world, validation = job.options, job.world, held_out(job)
    progress = Progress(options.steps, trainer.step, enabled=world.rank == 0)
    peak, seconds = None, 0.0
    losses: list[Tensor] = []
    began = time.perf_counter()
    while (step := trainer.step) < (options.stop_after or options.steps):
        batches = [job.batches.batch(step, micro, world.rank, world.size) for micro in range(options.microbatches)]
        if step + 1 == options.steps:  # it only runs slower for it
            peak = PeakMemory(device, trainer.params.values(), trainer.optimizer)
        with peak or nullcontext():
            loss = trainer.train_step([(x.to(device), y.to(device)) for x, y in batches], options.learning_rate(step))
        step = trainer.step
        losses.append(loss)
        progress.advance()
        validates, saves, shows = (
            step == options.steps or (n > 0 and step % n == 0)
            for n in (options.valid_every, options.save_every, options.log_every)
        )
        if not (validates or saves or shows):
            continue
        recent = mean_over_ranks(losses)
        history.train += recent
        took = time.perf_counter() - began
        seconds += took
        if validates:
            valid = validate(trainer, validation, device)
            history.valid.append((step, valid))
        speed = len(recent) * options.batch_size * options.seq_len / took
        progress.show(step, sum(recent) / len(recent), speed, valid if validates else None)
        if saves:
            job.checkpoints.save(step, trainer.params, trainer.optimizer, history)
        losses, began = [], time.perf_counter()
    progress.close()
    return seconds, peak


def run(job: Job) -> int:
    """The whole run, from meeting the other processes to leaving them. Returns the exit code."""
    options, rank = job.options, job.world.rank
    mesh = meet(job)
    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, job.world.local_rank)
    trainer = build(job, mesh, device)
    history = job.saved.history if job.saved is not None else History()
    first = trainer.step
    if rank == 0:
        say(
            f"GPT of {sum(p.numel() for p in trainer.model.parameters()):,} parameters in {options.layers + 1} units, "
            f"mesh {options.mesh_name} ({dist.get_backend()}), {options.api} API; {len(job.corpus.train):,} bytes of "
            f"text, {len(job.corpus.valid):,} held out"
        )
        if first:
            say(f"continuing after step {first} of {options.steps}")
    seconds, peak = train(job, trainer, device, history)
    code = 0
    if trainer.step == options.steps:
        text = sample(job, trainer, device)
        trainer.finish()
        if rank == 0:
            unigram = unigram_entropy(job.corpus.train, job.corpus.valid)
            memory: list[str] = []
            if trainer.step > first or text:
                whole = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
                memory += memory_lines(whole, trainer.memory(), trainer.optimizer, peak)
            result = Result(options, history, unigram, first, trainer.step, seconds, trainer.comm, memory, text)
            lines = result.lines()
            curve = draw_curve(options.out / "loss.png", history, unigram)
            (options.out / "report.txt").write_text("\n".join(lines) + "\n")
            say("\n".join(["", *lines, "", f"{curve}; the rest is in {options.out} too"]))
        if not trainer.comm.equal:
            say(f"train_gpt.py: process {rank}: the collectives differ from the prediction", error=True)
            code = 1
    elif rank == 0:
        say(f"stopped after step {trainer.step}, as asked; --resume continues from the last checkpoint")
    dist.barrier()
    dist.destroy_process_group()
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line to exit code: 0, 1 where the collectives differ, 2 for a refusal, 130 for an interrupt."""
    world = World.from_environment()
    try:
        options = parse(arguments, world)
        torch.set_num_threads(options.threads)
        job = prepare(options, world)
    except Refused as refusal:
        say(f"train_gpt.py: error: {' '.join(str(refusal).split())}", error=True)
        if world.size > 1:
            time.sleep(1.5)  # torchrun ends the others as soon as one has left; let them say their line too
        return 2
    try:
        return run(job)
    except KeyboardInterrupt:
        if world.rank == 0:
            say("interrupted; --resume continues from the last checkpoint", error=True)
        os._exit(130)  # the other processes may wait in a collective, and this one's groups can't be closed then


if __name__ == "__main__":
    sys.exit(main())
