"""Attempts that all ranks finish or none, though a rank may fail alone."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn

from hsdp_fn import Collective, HSDPState
from hsdp_fn.recovery import Attempt, ModuleAttempt, StateAttempt

from .backend import ms_backend
from .roots import root_tree


def recoverable(target: HSDPState | nn.Cell, *, schedule: Sequence[Collective] | None = None) -> Attempt:
    """One microbatch (or several) that all ranks take, or none. A context manager.

    With a cell of `fully_shard` (the root): run forward and backward inside; with ``loss.backward()`` gradients are
    added to ``.grad`` when all ranks have succeeded, with ``mindspore.value_and_grad`` use what it returns afterwards
    only. With a state: inside, go on from ``attempt.state`` and assign to it; afterwards it is the new state if all
    ranks have succeeded, else the old one, which is still good::

        with recoverable(state) as attempt:
            (loss, _), attempt.state = step(attempt.state, x, y)
        state = attempt.state

    A rank that fails can free its peers only if it knows what they will issue: the collectives of an attempt must be
    the same each time. It takes ``schedule``, or what such an attempt issued the last time, or `expected_comm` of one
    forward and backward. Where none of these begins with what it has issued so far, or where a collective itself has
    failed, it can't help, says so in a note to its exception, and its peers wait for the communication's own timeout
    (``mccl``: 30 s, after which its groups can't be used any more). The model's own collectives aren't known here.

    Communicates at the end: one number, over the shard group and, where there is one, over the replicate group; after a
    failure also one short message a rank.

    Args:
        target: a state, or the root cell. Run the optimizer outside, and let exceptions leave the block: a rank that
            catches one inside and goes on has issued other collectives than its peers.
        schedule: all that the attempt issues, if it is known better.

    Raises (at the end):
        PeerFailed: on ranks that have succeeded where others haven't; names these and what they met.
        Whatever was raised inside, on the ranks where it was. The target is as it was before, on all ranks.
    """
    if isinstance(target, HSDPState):
        return StateAttempt(target, ms_backend(target), None, schedule, ms._no_grad)
    return ModuleAttempt(root_tree(target, "recoverable"), target, None, schedule, ms._no_grad)
