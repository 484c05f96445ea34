"""Have all ranks sharded the same model, with the same weights?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from .backend import RankBackend
from .errors import RankMismatchError
from .layout import Layout
from .mesh import MeshSpec


def agree(
    backend: RankBackend,
    layout: Layout,
    initial: Sequence[Sequence[tuple[MeshSpec, str]]],
    *,
    stacklevel: int = 6,
) -> None:
    """Do all ranks have the same layout, and had they the same weights when these were sharded? Warns if not the
    latter. Communicates one short message a rank.

    Args:
        initial: of each unit, for each of its meshes, a fingerprint of the weights there (without spaces and commas),
            which that mesh's ranks share; "" where they have changed since, by loading a checkpoint say.
        stacklevel: which caller the warning points at, as `warnings.warn` counts.

    Raises:
        RankMismatchError: the layouts differ.
    """
    prints = ",".join(text for unit in initial for _, text in unit)
    answers = {r: m.partition(" ") for r, m in backend.exchange(f"{layout.digest} {prints}").items()}
    if len(digests := {digest for digest, _, _ in answers.values()}) > 1:
        raise RankMismatchError(f"ranks have sharded different models or policies: layouts {sorted(digests)}")
    weights = {rank: iter(found.split(",")) for rank, (_, _, found) in answers.items()}
    names = []
    for unit, meshes in zip(layout.units, initial, strict=True):
        for mesh, _ in meshes:
            column = {rank: next(found) for rank, found in weights.items()}
            if len({column.get(rank, "") for rank in mesh.data_parallel_group(backend.rank)} - {""}) > 1:
                names.append(unit.title)
    if names:
        warnings.warn(
            f"ranks had different weights when units {names} were sharded, and train a mixture of them now. Seed all "
            f"ranks alike, load a checkpoint, or call broadcast_module before fully_shard",
            stacklevel=stacklevel,
        )
