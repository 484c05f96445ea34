"""Every error type of the library.

All derive from `HSDPError`. Each also derives from the builtin that a caller would expect, so `except ValueError`
written for another library keeps working. Messages name the parameter or unit by its fully qualified name, what was
found, what was expected, and what to do.
"""


class HSDPError(Exception):
    """Base of all errors raised by hsdp_fn and its backends."""


class MeshError(HSDPError, ValueError):
    """A mesh that can't exist, an axis it doesn't have, or a world of another size."""


class PolicyError(HSDPError, ValueError):
    """A policy field with a value outside its domain."""


class LayoutError(HSDPError, ValueError):
    """Parameters and units that don't fit together, or tensors that don't match the layout they are given to."""


class UnknownUnitError(HSDPError, LookupError):
    """A unit name that the layout doesn't have."""


class PhaseError(HSDPError, RuntimeError):
    """A call that the transition table doesn't allow in the state's present phase. The state stays usable."""


class PendingError(PhaseError):
    """A collective's buffer was read before `wait`."""


class StaleStateError(HSDPError, RuntimeError):
    """A state that an earlier call consumed was used again."""


class GradientError(HSDPError, ValueError):
    """Gradients whose names, shapes or dtypes don't match the layout."""


class RankMismatchError(HSDPError, RuntimeError):
    """Ranks disagree on something that must be the same everywhere. Raised on every rank."""


class PeerFailed(HSDPError, RuntimeError):
    """Other ranks failed in an attempt that all had to finish, so this one dropped it too. The state is as before.

    Attributes:
        ranks: global ranks that failed.
        reasons: what each of them met, by rank.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        self.reasons = dict(sorted(reasons.items()))
        self.ranks = tuple(self.reasons)
        texts = "; ".join(f"rank {rank}: {reason}" for rank, reason in self.reasons.items())
        super().__init__(f"other ranks failed, so nobody took this attempt: {texts}")


class BackendError(HSDPError, RuntimeError):
    """The backend can't do what the layout asks of it (a dtype, a device, a collective)."""
