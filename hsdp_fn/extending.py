"""Classes of modules that are extended in place: ``HSDP{Orig}`` with bases ``(HSDPModule, Orig)``."""

from __future__ import annotations

import weakref
from weakref import WeakKeyDictionary

# The extended class refers to its original, so the value must not keep it.
_CLASSES: WeakKeyDictionary[type, dict[type, weakref.ref[type]]] = WeakKeyDictionary()


def extended_class(original: type, base: type, prefix: str) -> type:
    """The class ``{prefix}{Orig}`` with bases ``(base, original)``; the same one whenever it is asked for."""
    known = _CLASSES.setdefault(original, {})
    found = known[base]() if base in known else None
    if found is None:
        found = type(f"{prefix}{original.__name__}", (base, original), {"__module__": original.__module__})
        known[base] = weakref.ref(found)
    return found


def original_class(cls: type, base: type) -> type:
    """What `extended_class` has extended by ``base``, or a class derived from it, to get ``cls``.

    Raises:
        TypeError: nothing; ``cls`` is only what others are extended by.
    """
    for original in cls.__mro__:
        if not issubclass(original, base) and original not in base.__mro__:
            return original
    raise TypeError(f"{cls.__name__} isn't constructed: fully_shard extends the class of a module by it")
