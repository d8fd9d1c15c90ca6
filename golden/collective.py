# SPDX-License-Identifier: Apache-2.0
"""Bit-exact model of the collective operations.

Tiles stand in a mesh [mesh_y, mesh_x]. An operation over the whole mesh ("mesh") joins all of them,
one over rows ("row") joins those of each row, one over columns ("column") those of each column.
Every tile of the scope gets the same result.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from golden import fp32

SCOPES = ("mesh", "row", "column")


def _check(parts: npt.ArrayLike, scope: str) -> fp32.Float32:
    values = np.asarray(parts, np.float32)
    if values.ndim != 3:
        raise ValueError(f"parts must have the shape [mesh_y, mesh_x, n], not {values.shape!r}")
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(SCOPES)}, not {scope!r}")
    return values


def _chain(values: fp32.Float32, axis: int, combine: Callable) -> fp32.Float32:
    """((v0 . v1) . v2) ... along `axis`, which stays with length 1; a lone value is unchanged."""
    first, *others = np.split(values, values.shape[axis], axis)
    for other in others:
        first = combine(first, other)
    return first


def _allreduce(parts: npt.ArrayLike, scope: str, combine: Callable) -> fp32.Float32:
    values = _check(parts, scope)
    total = values
    if scope in ("mesh", "row"):
        total = _chain(total, 1, combine)
    if scope in ("mesh", "column"):
        total = _chain(total, 0, combine)
    return np.broadcast_to(total, values.shape).copy()


def allreduce_sum(parts: npt.ArrayLike, scope: str = "mesh") -> fp32.Float32:
    """Sums of `parts` [mesh_y, mesh_x, n], the result of every tile in the same shape.

    A row is added from x = 0 upwards, a column from y = 0 upwards; the mesh is the rows' sums,
    added as a column. Each addition is `golden.fp32.add`. A part with nothing to be added to is
    taken as it is.
    """
    return _allreduce(parts, scope, fp32.add)


def allreduce_max(parts: npt.ArrayLike, scope: str = "mesh") -> fp32.Float32:
    """Maxima (`golden.fp32.maximum`) of `parts` [mesh_y, mesh_x, n], in the order of the sums."""
    return _allreduce(parts, scope, fp32.maximum)


def broadcast(parts: npt.ArrayLike, root: int, scope: str = "mesh") -> fp32.Float32:
    """The part of the root of each scope, every bit of it, at every tile; [mesh_y, mesh_x, n].

    `root` is y * mesh_x + x in the mesh, x in a row, y in a column.
    """
    values = _check(parts, scope)
    mesh_y, mesh_x, n = values.shape
    members = {"mesh": mesh_x * mesh_y, "row": mesh_x, "column": mesh_y}[scope]
    if not 0 <= root < members:
        raise ValueError(f"root must be from 0 to {members - 1}, not {root!r}")
    bits = fp32.bits(values)  # NaN payloads survive as integers
    if scope == "mesh":
        source = bits.reshape(1, mesh_x * mesh_y, n)[:, root : root + 1]
    elif scope == "row":
        source = bits[:, root : root + 1]
    else:
        source = bits[root : root + 1]
    return fp32.from_bits(np.broadcast_to(source, bits.shape).copy())
