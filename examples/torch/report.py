"""What a training run shows: progress, collectives against the prediction, memory, the loss curve."""

import importlib.util
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import History, local
from options import Options, say
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hsdp_fn import Collective, HSDPState, totals

FINAL_STEPS = 50  # the train loss that is reported at the end is the mean over this many
UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


class Progress:
    """A bar on a terminal, lines elsewhere; silent where it isn't `enabled`.

    Args:
        steps: of the whole run; `done` of them are done already.
    """

    def __init__(self, steps: int, done: int, *, enabled: bool) -> None:
        self._steps, self._enabled = steps, enabled
        self._bar: Any = None
        if enabled and sys.stdout.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=steps, initial=done, unit="step", file=sys.stdout, dynamic_ncols=True)

    def advance(self) -> None:
        """One more step is done."""
        if self._bar is not None:
            self._bar.update()

    def show(self, step: int, loss: float, speed: float, valid: float | None) -> None:
        """Mean loss and speed (tokens/s, all processes) since the last time, and the validation loss, if any."""
        held_out = "" if valid is None else f"  validation {valid:.4f}"
        if self._bar is None:
            if self._enabled:
                say(f"step {step:>5}/{self._steps}  loss {loss:.4f}  {speed:>7,.0f} tokens/s{held_out}")
            return
        self._bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
        if held_out:
            self._bar.write(f"step {step:>5}/{self._steps}  loss {loss:.4f}{held_out}", file=sys.stdout)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()


class CommTally:
    """The collectives that the states' ledgers record, beside those that the layout predicts."""

    def __init__(self) -> None:
        self.issued: list[Collective] = []
        self.expected: list[Collective] = []

    def expect(self, collectives: Iterable[Collective]) -> None:
        """What `expected_comm` says of a call that has been made."""
        self.expected += collectives

    def record(self, state: HSDPState) -> None:
        """Take in the state's ledger; call it before whatever empties that (an optimizer step), and at the end."""
        self.issued += state.ledger

    @property
    def equal(self) -> bool:
        """The same collectives, each equally often: kind, unit, bytes, padding, dtype, group."""
        return Counter(self.issued) == Counter(self.expected)

    def lines(self) -> Iterator[str]:
        """A table by kind: count, bytes and padding issued, then the same expected, and whether they are equal."""
        yield f"  {'':<14} {'issued':>8} {'bytes':>15} {'padding':>12} | {'expected':>8} {'bytes':>15} {'padding':>12}"
        for kind in dict.fromkeys(c.op for c in (*self.issued, *self.expected)):
            mine, theirs = ([c for c in side if c.op == kind] for side in (self.issued, self.expected))
            yield _comm_line(kind, mine, theirs)
        order = "in the same order" if self.issued == self.expected else "in another order"
        yield _comm_line("total", self.issued, self.expected) + (f", {order}" if self.equal else "")


def _comm_line(title: str, issued: list[Collective], expected: list[Collective]) -> str:
    def cells(collectives: list[Collective]) -> str:
        sums = totals(collectives).values()
        nbytes, padding = sum(t.nbytes for t in sums), sum(t.padding for t in sums)
        return f"{len(collectives):>8,} {nbytes:>15,} {padding:>12,}"

    verdict = "equal" if Counter(issued) == Counter(expected) else "DIFFERENT"
    return f"  {title:<14} {cells(issued)} | {cells(expected)}  {verdict}"


class PeakMemory:
    """The most bytes that live tensors had while this context was open. Changes no result.

    On an accelerator the allocator knows. On the CPU every operator's results are followed, by storage, from the
    operator that makes them until they are freed, which slows the step down; scratch memory inside one operator isn't
    seen.

    Args:
        device: where the computation runs.
        params, optimizer: whose tensors exist already; others are noticed when an operator returns a view of them.
    """

    def __init__(self, device: torch.device, params: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._tracker = _LiveStorages([*(p.detach() for p in params), *_tensors(optimizer)])
        self.nbytes = 0

    @property
    def how(self) -> str:
        """How it is measured, for the reader of the number."""
        if self._module is not None:
            return "the allocator's peak"
        return "live tensor storages, followed operator by operator"

    def __enter__(self) -> "PeakMemory":
        if self._module is not None:
            self._module.reset_peak_memory_stats()
        else:
            self._tracker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._module is not None:
            self.nbytes = self._module.max_memory_allocated()
        else:
            self._tracker.__exit__(*error)
            self.nbytes = self._tracker.peak


class _LiveStorages(TorchDispatchMode):
    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()
        for tensor in held:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._see(leaf)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = local(tensor).untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, key, nbytes).atexit = False

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def mean_over_ranks(values: Sequence[Tensor]) -> list[float]:
    """Means of scalars, bit for bit the same however they are grouped into calls.

    Communicates: one all-gather over all processes.
    """
    mine = torch.stack(list(values))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.stack(parts).cpu().double().mean(0).tolist()


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


def memory_lines(
    whole: int, held: Mapping[str, int], optimizer: torch.optim.Optimizer, peak: PeakMemory | None
) -> Iterator[str]:
    """Memory of this process between steps and at its highest.

    Args:
        whole: bytes of the whole model's parameters.
        held: what `memory_bytes` says of the sharding state.
    """
    fields = ", ".join(f"{name} {size:,}" for name, size in held.items() if size and name != "total")
    own = sum(local(t).nbytes for t in _tensors(optimizer))
    yield f"  at rest   {held['total'] + own:>13,}  state {held['total']:,} ({fields}), optimizer {own:,}"
    yield f"            {'':>13}  (the whole model: parameters {whole:,}, AdamW {2 * whole:,})"
    if peak is not None:
        yield f"  at peak   {peak.nbytes:>13,}  in the last step, forward to optimizer; {peak.how}"


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run, as one process knows it.

    Attributes:
        unigram: unigram entropy of the held-out text, nats for each byte.
        first: the step that this run began with: 0, or the checkpoint's.
        last: the step that it ended with.
        seconds: of this run's training steps, validation and saving apart.
        memory: see `memory_lines`; empty where the model hasn't run.
        text: the sample, without its prompt.
    """

    options: Options
    history: History
    unigram: float
    first: int
    last: int
    seconds: float
    comm: CommTally
    memory: Sequence[str]
    text: bytes

    def lines(self) -> list[str]:
        """The final report. Does not communicate."""
        trained = self.last > self.first
        covers = f"steps {self.first + 1} to {self.last}, validation and sample" if trained else "sample only"
        out = [*self._losses(), ""]
        out += [f"collectives of process 0: {covers}", *self.comm.lines(), ""]
        if self.memory:
            out += ["memory of process 0, in bytes", *self.memory, ""]
        return [*out, *self._sample()] if self.text else out[:-1]

    def _losses(self) -> Iterator[str]:
        recent, steps = self.history.train[-FINAL_STEPS:], self.last - self.first
        yield f"losses after {self.last} steps, in nats per byte"
        yield f"  train            {sum(recent) / len(recent):.4f}  (mean of the last {len(recent)} steps)"
        yield f"  validation       {self.history.valid[-1][1]:.4f}  (held-out files)"
        yield f"  unigram entropy  {self.unigram:.4f}  (validation loss of byte frequencies alone)"
        if steps:
            speed = steps * self.options.batch_size * self.options.seq_len / self.seconds
            yield f"  {steps} steps in {self.seconds:.0f} s, {speed:,.0f} tokens/s, validation and saving apart"

    def _sample(self) -> Iterator[str]:
        yield f"sample after {self.options.prompt!r}, temperature {self.options.temperature}"
        for row in (self.options.prompt + self.text.decode(errors="replace")).split("\n"):
            yield "  | " + "".join(c if c.isprintable() else UNPRINTABLE for c in row.expandtabs())


def draw_curve(path: Path, history: History, unigram: float) -> str:
    """The loss curve as a PNG. Returns a line that says where it is, or that matplotlib isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no loss curve, as matplotlib isn't installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(history.train) + 1)
    axes.plot(steps, history.train, color="tab:blue", alpha=0.2, linewidth=0.7)
    axes.plot(steps, smoothed(history.train), color="tab:blue", linewidth=1.6, label="train (smoothed)")
    if history.valid:
        at, losses = zip(*history.valid, strict=True)
        axes.plot(at, losses, "o-", color="tab:orange", markersize=4, linewidth=1, label="validation (held-out files)")
        axes.annotate(f"{losses[-1]:.3f}", (at[-1], losses[-1]), (4, 8), textcoords="offset points", ha="right")
    axes.axhline(unigram, color="gray", linestyle="--", linewidth=1, label=f"unigram entropy {unigram:.3f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(0, len(history.train) * 1.02), ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"loss curve in {path}"


def smoothed(values: list[float], share: float = 0.02) -> list[float]:
    """Mean over a centred window of about `share` of the curve, narrower at its start, where it is steep."""
    reach = int(share * len(values) / 2)
    out = []
    for i in range(len(values)):
        near = min(reach, i)
        window = values[i - near : i + near + 1]
        out.append(sum(window) / len(window))
    return out
