"""What `recovery` runs: each failure with the step after it, and failures at every place; right or wrong, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.failures import BLOCKS, FAULTS, Boom, Contender, batch
from hsdp_fn import Keep, PeerFailed, PhaseError, RankMismatchError, StaleStateError, Sync

RANKS = (0, 1)
RIGHT = "right"

# ---------------------------------------------------------------------------------------------------------- scenarios


def fails(
    contender: Contender,
    at: tuple[str, int],
    *,
    ranks: Sequence[int] = RANKS,
    before: Sync | None = None,
    retry: bool = False,
    clear: bool = False,
) -> str:
    """A failure, and the step after it.

    Args:
        at: where; see `Faults`.
        ranks: who fails.
        before: a microbatch that succeeds before, and how far it is reduced.
        retry: keep it, and run the failed one again. Otherwise the next step begins anew.
        clear: also drop gradients afterwards.
    """
    failing = 1 if retry else 0  # the same batch everywhere else, so that doubled gradients are exactly that
    if retry and before is not None:
        contender.microbatch(batch(0), before)
    contender.microbatch(batch(failing))
    expected = contender.gradients()

    if before is not None:
        contender.microbatch(batch(0), before)
    shown = contender.visible()
    alone = len(ranks) == 1
    FAULTS.collectives, FAULTS.at = 0, at if dist.get_rank() in ranks else None
    met = raised(partial(contender.attempt if alone else contender.microbatch, batch(failing)))
    FAULTS.at = None
    answers = [] if same(shown, contender.visible()) else ["gradients left behind"]
    if contender.ours and not as_told(met, ranks):
        answers.append(f"met {met!r}")
    if not (alone and contender.ours):  # after `recoverable` there is nothing to do
        contender.reset(Keep.ACCUMULATED if retry else Keep.NOTHING)
    elif before is not None and not retry:
        contender.reset(Keep.NOTHING)
    if clear:
        contender.clear()
        answers = []
    contender.microbatch(batch(failing))
    return verdict([*answers, *differences(contender.gradients(), expected)])


def old_graph(contender: Contender, **_: Any) -> str:
    """Right is to refuse: what would come out is the gradient of neither the old nor the new parameters."""
    contender.microbatch(batch(1))
    true = contender.gradients()
    contender.microbatch(batch(0))
    contender.gradients()
    met = raised(contender.outdated)
    if isinstance(met, (PhaseError, StaleStateError)):
        return RIGHT
    return verdict([f"met {met!r}"] if met else [f"in silence, {d}" for d in differences(contender.gradients(), true)])


def divergent(contender: Contender, **_: Any) -> str:
    """Rank 1 doesn't use the parameters of block 1. Right is to refuse, on both ranks, and to go on."""
    contender.microbatch(batch(0))
    expected = contender.gradients()
    FAULTS.skipped = 1 if dist.get_rank() == 1 else None
    met = raised(partial(contender.microbatch, batch(0)))
    FAULTS.skipped = None
    answers = [] if isinstance(met, RankMismatchError) else [f"met {met!r}" if met else "in silence"]
    contender.reset(Keep.NOTHING)
    contender.clear()
    contender.microbatch(batch(0))
    return verdict([*answers, *differences(contender.gradients(), expected)])


@dataclass(frozen=True, slots=True)
class Scenario:
    """A failure and what follows.

    Attributes:
        run: to be called with a contender, on each rank.
        hybrid, check: of the contender.
        hangs: torch may hang in it.
        clear: `zero_grad` might help torch.
    """

    run: Callable[..., str]
    hybrid: bool = False
    check: bool = False
    hangs: bool = False
    clear: bool = True


def alone(kind: str, index: int, **more: Any) -> Scenario:
    return Scenario(partial(fails, at=(kind, index), ranks=[0], **more), hangs=True, clear=False)


SCENARIOS = {
    "exception in forward, all ranks": Scenario(partial(fails, at=("forward", 1))),
    "exception in backward, all ranks": Scenario(partial(fails, at=("backward", 1))),
    "no-sync microbatch, then exception": Scenario(partial(fails, at=("backward", 1), before=Sync.NONE)),
    "all-reduce put off, then exception": Scenario(partial(fails, at=("backward", 1), before=Sync.SHARD), hybrid=True),
    "failed microbatch again, sums kept": Scenario(
        partial(fails, at=("backward", 0), before=Sync.NONE, retry=True), clear=False
    ),
    "rank 0 alone in forward": alone("forward", 1),
    "rank 0 alone in backward": alone("backward", 1),
    "rank 0 alone at a collective": alone("collective", 3),
    "rank 0 alone, again, sums kept": alone("backward", 0, before=Sync.NONE, retry=True),
    "old graph after an optimizer step": Scenario(old_graph, clear=False),
    "ranks use different parameters": Scenario(divergent, check=True, hangs=True, clear=False),
}


def raised(call: Callable[[], None]) -> Exception | None:
    """What the call raises. It isn't kept alive by its traceback."""
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    return None


def as_told(met: Exception | None, failing: Sequence[int]) -> bool:
    """Whether a failed rank has met its own exception, and another one what says who failed."""
    if dist.get_rank() in failing:
        return isinstance(met, Boom)
    return isinstance(met, PeerFailed) and met.ranks == tuple(failing) and "Boom" in met.reasons[failing[0]]


def same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    """Bit for bit; None is None only."""
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs
    )


def differences(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> list[str]:
    """How gradients differ; nothing if they are equal bit for bit."""
    kinds = [_difference(found.get(name), expected[name]) for name in expected]
    words = [f"{kinds.count(word)} {word}" for word in ("doubled", "tripled", "otherwise wrong") if word in kinds]
    return [f"{', '.join(words)} of {len(expected)} gradients"] if words else []


def _difference(found: Tensor | None, expected: Tensor | None) -> str:
    if same([found], [expected]):
        return ""
    for times, word in ((2, "doubled"), (3, "tripled")):
        if found is not None and expected is not None and torch.allclose(found, times * expected):
            return word
    return "otherwise wrong"


def verdict(problems: Sequence[str]) -> str:
    return f"WRONG: {'; '.join(problems)}" if problems else RIGHT


# --------------------------------------------------------------------------------------------------- injected failures


@dataclass(frozen=True, slots=True)
class Tally:
    """Injected failures of a kind: how many, and how many went right on both ranks."""

    right: int
    count: int
    problems: tuple[str, ...] = ()


def inject(contender: Contender, stride: int) -> dict[str, Tally]:
    """A failure at every (``stride``-th) place, on one rank and on both, and a clean step after each."""
    contender.attempt(batch(1))  # the first one also sets up
    contender.gradients()
    FAULTS.collectives = 0
    contender.attempt(batch(1))
    collectives, expected = FAULTS.collectives, contender.gradients()
    places = {
        "collectives": [("collective", i) for i in range(0, collectives, stride)],
        "forward": [("forward", i) for i in range(0, BLOCKS + 1, stride)],
        "backward": [("backward", i) for i in range(0, BLOCKS + 1, stride)],
    }
    return {
        kind: _tally([_injected(contender, at, ranks, expected) for ranks in ([0], [1], [0, 1]) for at in found])
        for kind, found in places.items()
    }


def _injected(contender: Contender, at: tuple[str, int], ranks: Sequence[int], expected: dict[str, Any]) -> str:
    shown = contender.visible()
    FAULTS.collectives, FAULTS.at = 0, at if dist.get_rank() in ranks else None
    met = raised(partial(contender.attempt, batch(1)))
    FAULTS.at = None
    problems = [] if as_told(met, ranks) else [f"met {met!r}"]
    problems += [] if same(shown, contender.visible()) else ["not as before"]
    contender.microbatch(batch(1))
    problems += differences(contender.gradients(), expected)
    return f"{at} on ranks {ranks}: {'; '.join(problems)}" if problems else ""


def _tally(problems: Sequence[str]) -> Tally:
    """Of both ranks. Communicates."""
    mine = torch.tensor([int(not p) for p in problems])
    dist.all_reduce(mine, dist.ReduceOp.MIN)
    return Tally(int(mine.sum()), len(problems), tuple(p for p in problems if p))
