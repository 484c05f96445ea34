"""Each wait and event of this library: what is taken away in `library_orders.py`, and which scenario then has wrong
values. Data only, which the tests read too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait or event.

    Attributes:
        removed: what is removed, and where it is.
        without: the function of `library_orders.py` that removes it, with its arguments.
        scenario: the function there that tells whether values are right.
        spare: why values stay right without it; empty if they don't.
    """

    removed: str
    without: tuple[str, ...]
    scenario: str
    spare: str = ""


_RECORDED = "torch_npu keeps a collective's memory until it has run, whoever waits; what it brings is thrown away"

WAITS: dict[str, Wait] = {
    "all_gather": Wait("unit.finish_gather: the wait for an all-gather", ("handles", "all_gather"), "training"),
    "reduce_scatter": Wait(
        "unit.advance_reduce: the wait for a reduce-scatter", ("handles", "reduce_scatter"), "training"
    ),
    "all_reduce": Wait("unit.advance_reduce: the wait for an all-reduce", ("handles", "all_reduce"), "replicated"),
    "custom_handle": Wait("comm._Once: the wait for a custom collective's handle", ("once",), "messages"),
    "messages": Wait("p2p.Transfer: the waits for its messages", ("transfers",), "messages"),
    "vote": Wait("TorchBackend.votes: the wait for its all-reduce", ("waits_of", "votes"), "votes"),
    "differentiable": Wait("differentiable._wait: wait_tensor", ("wait_tensor",), "differentiable"),
    "load_event": Wait("TorchBackend.load: the event of a copy to the device", ("events_of", "load"), "looked_at"),
    "store_event": Wait("TorchBackend.store: the event of a copy to the host", ("events_of", "store"), "offloaded"),
    "settle_after_forward": Wait("Tree._pass_ends: settle", ("settle", "_pass_ends"), "looked_at"),
    "settle_after_backward": Wait("Tree._backward_ends: settle", ("settle", "_backward_ends"), "offloaded"),
    "settle_after_forward_with_a_graph": Wait(
        "Tree._pass_ends: settle, where a backward may come", ("settle", "_pass_ends"), "looked_at_with_a_graph"
    ),
    "settle_after_unshard": Wait("Tree.unshard: settle", ("settle", "unshard"), "unsharded"),
    "settle_after_a_later_wait": Wait("Tree.finish_unshard: settle", ("settle", "finish_unshard"), "unsharded_later"),
    "settle_in_unshard": Wait("ops.unshard: settle", ("settle", "unshard"), "gathered_at_once"),
    "settle_in_evaluate": Wait("functional.evaluate: settle", ("settle", "run"), "evaluated"),
    "settle_in_value_and_grad": Wait("functional.value_and_grad: settle", ("settle", "step"), "stepped"),
    "settle_in_grads": Wait("ops.grads: settle", ("settle", "take"), "taken"),
    "settle_in_wait": Wait("ops.wait: settle", ("settle", "finish"), "gathered"),
    "settle_in_masters": Wait(
        "ops.masters: settle",
        ("settle", "masters"),
        "stepped",
        spare="whatever copies masters settles itself",
    ),
    "settle_in_reduce_grads": Wait(
        "ops.reduce_grads: settle",
        ("settle", "reduce"),
        "reduced",
        spare="gradients leave a state by grads only, which settles again",
    ),
    "land_in_add": Wait("TorchBackend.add: _land", ("landing_in", "add"), "added_on_the_host"),
    "land_in_clone": Wait(
        "TorchBackend.clone: _land",
        ("landing_in", "clone"),
        "cloned",
        spare="a state that can be cloned has nothing in flight, and what made it has settled",
    ),
    "optimizer_event": Wait("Tree._await_optimizer: wait_event", ("optimizer_event",), "optimizer_on_a_stream"),
    "hook_stream": Wait("UnitBackend._run_hook: the hook's stream waits for the current", ("hook", "begins"), "hooked"),
    "after_hook": Wait("UnitBackend._run_hook: the current stream waits for the hook's", ("hook", "ends"), "hooked"),
    "hsdp_sync_stream": Wait("facade.hsdp_sync_stream: synchronize", ("sync_stream",), "read_on_another_stream"),
    "drop_flight": Wait(
        "unit.drop_flight: the waits for what a dropped iteration had in flight",
        ("waits_of", "drop_flight"),
        "dropped",
        spare=_RECORDED,
    ),
    "refused_collective": Wait(
        "unit._Awaiting: the waits for what was launched before a collective couldn't be issued",
        ("waits_of", "__exit__"),
        "refused",
        spare=_RECORDED,
    ),
    "drain": Wait("unit.pay: the wait of a rank that has failed", ("waits_of", "pay"), "drained", spare=_RECORDED),
}
