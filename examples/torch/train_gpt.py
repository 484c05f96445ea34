"""Train a small GPT with hsdp-fn's functional API: the project's main example. ``--help`` lists what can be varied.

    torchrun --standalone --nproc_per_node=2 examples/torch/train_gpt.py

The sharding state is a value: `value_and_grad`, `evaluate` and `optimizer_step` each take one and return the next, and
a checkpoint is its masters. Everything that one process can refuse is refused before the processes meet.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import Checkpoints, History, Saved
from gpt import GPT, GPTConfig, generate, loss_fn
from options import Options, Refused, World, check_device, parse, say
from report import CommTally, PeakMemory, Progress, Result, draw_curve, mean_over_ranks
from text import Batches, Corpus, load_corpus, unigram_entropy, validation_batches
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from hsdp_fn import (
    CPUOffloadPolicy,
    HSDPState,
    MixedPrecisionPolicy,
    PrefetchPolicy,
    Sync,
    expected_comm,
    wait,
)
from hsdp_fn_torch import (
    Params,
    evaluate,
    functional_call,
    optimizer_step,
    shard_module,
    shard_parameters,
    value_and_grad,
)

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
VALID_BATCH = 16  # windows of one forward, at most

Step = Callable[..., tuple[Any, HSDPState]]


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


@dataclass(frozen=True, slots=True)
class Tools:
    """What the loop uses besides the state, made once for a run.

    Attributes:
        device: where batches go.
        grad: ``(state, x, y, sync=...) -> ((loss, None), state')``; adds gradients of the mean over microbatches.
        loss: ``(state, x, y) -> (loss, state')``, without gradients.
        logits: ``(state, tokens) -> (logits, state')``, without gradients.
        params: this process's rows as leaf parameters, which `optimizer` updates in place.
        comm: collectives issued and expected so far.
        validation: this process's batches of held-out windows, equally many on each.
    """

    device: torch.device
    grad: Step
    loss: Step
    logits: Step
    params: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    comm: CommTally
    validation: list[tuple[Tensor, Tensor]]


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


def build(job: Job, mesh: DeviceMesh, device: torch.device) -> tuple[HSDPState, Tools]:
    """The first state, of step 0 or of the checkpoint, and the tools. Communicates: see `shard_module`."""
    options, saved = job.options, job.saved
    model = GPT(job.config)
    model.init_weights(torch.Generator().manual_seed(options.seed))  # the same on every process
    model.to(device)
    if options.checkpoint_activations != "none":
        reentrant = options.checkpoint_activations == "reentrant"
        for block in model.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    state = shard_module(
        model,
        mesh,
        [f"layers.{i}" for i in range(options.layers)],
        mp_policy=MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype),
        offload_policy=CPUOffloadPolicy() if options.offload else None,
        prefetch=PrefetchPolicy(options.prefetch, options.prefetch),
        reshard_after_forward={"blocks": None, "always": True, "never": False}[options.reshard],
    )
    if saved is not None:
        state = saved.restore(state)
    params = shard_parameters(state)
    optimizer = torch.optim.AdamW(params.values(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    if saved is not None:
        optimizer.load_state_dict(saved.optimizer)

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(functional_call(model, params, x), y)

    share = -(-options.valid_windows // job.world.size)
    batch = min(VALID_BATCH, share)
    windows = -(-share // batch) * batch * job.world.size
    tools = Tools(
        device,
        grad=value_and_grad(lambda params, x, y: loss(params, x, y) / options.microbatches),
        loss=evaluate(loss),
        logits=evaluate(lambda params, tokens: functional_call(model, params, tokens)),
        params=params,
        optimizer=optimizer,
        comm=CommTally(),
        validation=list(
            validation_batches(job.corpus.valid, options.seq_len, windows, batch, job.world.rank, job.world.size)
        ),
    )
    return state, tools


def take_step(job: Job, tools: Tools, state: HSDPState) -> tuple[HSDPState, Tensor]:
    """One optimizer step. Communicates: what the tally is told to expect, and one element for the gradient's norm.

    Returns:
        The next state, and this process's mean loss over the step's microbatches.
    """
    options, step = job.options, state.step
    total = torch.zeros((), device=tools.device)
    for micro in range(options.microbatches):
        sync = Sync.FULL if micro + 1 == options.microbatches else Sync(options.sync)
        x, y = job.batches.batch(step, micro, job.world.rank, job.world.size)
        (loss, _), state = tools.grad(state, x.to(tools.device), y.to(tools.device), sync=sync)
        tools.comm.expect(expected_comm(state.layout, sync=sync))
        total += loss
    state = wait(state)  # the last all-reduces are in the ledger only once they are issued
    tools.comm.record(state)  # the optimizer step begins a new ledger
    for group in tools.optimizer.param_groups:
        group["lr"] = options.learning_rate(step)
    state, _ = optimizer_step(state, tools.optimizer, tools.params, max_norm=1.0)
    return state, total


def validate(tools: Tools, state: HSDPState) -> tuple[HSDPState, float]:
    """Mean loss of the held-out windows. Communicates: one forward's gathers a batch, and one exchange."""
    total = torch.zeros((), device=tools.device)
    for x, y in tools.validation:
        loss, state = tools.loss(state, x.to(tools.device), y.to(tools.device))
        tools.comm.expect(expected_comm(state.layout, backward=False))
        total += loss
    return state, mean_over_ranks([total / len(tools.validation)])[0]


def sample(job: Job, tools: Tools, state: HSDPState) -> tuple[HSDPState, bytes]:
    """Text after ``--prompt``, the same on all processes. Communicates: one forward's gathers for each byte."""
    options = job.options

    def forward(tokens: Tensor) -> Tensor:
        nonlocal state
        logits, state = tools.logits(state, tokens)
        tools.comm.expect(expected_comm(state.layout, backward=False))
        return logits

    generator = torch.Generator(tools.device).manual_seed(options.seed)
    text = generate(
        forward,
        options.prompt.encode(),
        options.sample_bytes,
        options.temperature,
        generator,
        seq_len=options.seq_len,
    )
    return state, text


def train(job: Job, tools: Tools, state: HSDPState, history: History) -> tuple[HSDPState, float, PeakMemory | None]:
    """All steps from `state` to the end, or to ``--stop-after``; `history` grows on the way.

    Returns:
        The last state, the seconds of the steps alone, and the memory of the last step of the run.
    """
    options, first = job.options, state.step
    progress = Progress(options.steps, first, enabled=job.world.rank == 0)
    peak, seconds = None, 0.0
    losses: list[Tensor] = []
    began = time.perf_counter()
    while state.step < (options.stop_after or options.steps):
        if state.step + 1 == options.steps:  # it only runs slower for it
            peak = PeakMemory(tools.device, state, tools.optimizer)
        with peak or nullcontext():
            state, loss = take_step(job, tools, state)
        losses.append(loss)
        progress.advance()
        validates, saves, shows = (
            state.step == options.steps or (n > 0 and state.step % n == 0)
            for n in (options.valid_every, options.save_every, options.log_every)
        )
        if not (validates or saves or shows):
            continue
        recent = mean_over_ranks(losses)
        history.train += recent
        took = time.perf_counter() - began
        seconds += took
        if validates:
            state, valid = validate(tools, state)
            history.valid.append((state.step, valid))
        speed = len(recent) * options.batch_size * options.seq_len / took
        progress.show(state.step, sum(recent) / len(recent), speed, valid if validates else None)
        if saves:
            job.checkpoints.save(state, tools.optimizer, history)
        losses, began = [], time.perf_counter()
    progress.close()
    return state, seconds, peak


def run(job: Job) -> int:
    """The whole run, from meeting the other processes to leaving them. Returns the exit code."""
    options, rank = job.options, job.world.rank
    mesh = meet(job)
    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, job.world.local_rank)
    state, tools = build(job, mesh, device)
    history = job.saved.history if job.saved is not None else History()
    first = state.step
    if rank == 0:
        say(
            f"GPT of {sum(p.numel for p in state.layout.params()):,} parameters in {len(state.layout.units)} units, "
            f"mesh {options.mesh_name} ({state.backend.name}); {len(job.corpus.train):,} bytes of text, "
            f"{len(job.corpus.valid):,} held out"
        )
        if first:
            say(f"continuing after step {first} of {options.steps}")
    state, seconds, peak = train(job, tools, state, history)
    code = 0
    if state.step == options.steps:
        state, text = sample(job, tools, state)
        tools.comm.record(state)
        if rank == 0:
            unigram = unigram_entropy(job.corpus.train, job.corpus.valid)
            result = Result(options, history, unigram, first, seconds, state, tools.optimizer, tools.comm, peak, text)
            lines = result.lines()
            curve = draw_curve(options.out / "loss.png", history, unigram)
            (options.out / "report.txt").write_text("\n".join(lines) + "\n")
            say("\n".join(["", *lines, "", f"{curve}; the rest is in {options.out} too"]))
        if not tools.comm.equal:
            say(f"train_gpt.py: process {rank}: the collectives differ from the prediction", error=True)
            code = 1
    elif rank == 0:
        say(f"stopped after step {state.step}, as asked; --resume continues from the last checkpoint")
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
