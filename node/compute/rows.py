"""How rows of log-probabilities travel: whole in fp16, or, where the vocabulary is large, the likeliest tokens and the mass of the rest.

A row of a sparse kind names `Shape.kept` tokens with their values, and one value that stands for every other token: so chosen that the
others keep the mass that they had together, whatever it was for each. Whoever reads such a row fills it: what is added, drawn from or
scored is always a row over the whole vocabulary, and a filled row that travels on arrives as it is. A row is a function of its values
alone, ties included, so that a sum made by a holder and the same sum made by a client are equal. What this costs a chain is measured by
`blocktrain-sim bench quality --parts vocabulary`.

Shapes: N rows, V vocabulary, K tokens kept. numpy only: clients have no torch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blocktrain.node.compute.sampling import Half
from blocktrain.node.ports import Buffer
from blocktrain.protocol.errors import PeerFault
from blocktrain.protocol.sweep import Shape

Places: TypeAlias = npt.NDArray[np.intp]


def pack(rows: Half, shape: Shape, terms: int) -> bytes:
    """Rows [N, V], each the sum of `terms` blocks' log-probabilities, as they travel: N x `Shape.row_bytes` bytes."""
    if not shape.kept:
        return rows.astype("<f2", copy=False).tobytes()
    out = np.empty(len(rows), _layout(shape))
    for row, packed in zip(rows, out, strict=True):
        places = _largest(row, shape.kept)
        packed["tokens"], packed["values"], packed["rest"] = places, row[places], _rest(row, places, terms)
    return out.tobytes()


def unpack(body: Buffer, shape: Shape) -> Half:
    """Rows [N, V] from all of `body`; read-only where they travel whole. Values are as they came: the caller judges them.

    Raises: PeerFault: tokens that are out of order or outside the vocabulary.
    """
    if not shape.kept:
        whole: Half = np.frombuffer(body, "<f2").reshape(-1, shape.vocabulary)
        return whole
    packed = np.frombuffer(body, _layout(shape))
    tokens: npt.NDArray[np.int64] = packed["tokens"].astype(np.int64)
    if tokens.size and (tokens[:, -1].max() >= shape.vocabulary or (np.diff(tokens, axis=1) <= 0).any()):
        raise PeerFault("an accumulator whose tokens are out of order or outside the vocabulary")
    rows: Half = np.repeat(packed["rest"].astype(np.float16)[:, None], shape.vocabulary, axis=1)
    np.put_along_axis(rows, tokens, packed["values"].astype(np.float16), axis=1)
    return rows


def settled(rows: Half, shape: Shape, terms: int) -> Half:
    """Rows [N, V] as whoever receives them will read them."""
    return unpack(pack(rows, shape, terms), shape) if shape.kept else rows


def fair(body: Buffer, shape: Shape) -> bool:
    """Whether `body` holds whole rows of what can be log-probabilities."""
    try:
        rows = unpack(body, shape)
    except (PeerFault, ValueError):
        return False
    return not rows.size or bool(rows.max() <= 0 and np.isfinite(rows.min()))  # NaN fails both


def _layout(shape: Shape) -> np.dtype[Any]:
    """Of one sparse row: K tokens in rising order, their values, and the value of every other token."""
    return np.dtype([("tokens", f"<u{shape.place_bytes}", shape.kept), ("values", "<f2", shape.kept), ("rest", "<f2")])


def _largest(row: Half, count: int) -> Places:
    """Where the `count` largest values [V] are, rising; of equal ones the first."""
    least = np.partition(row, -count)[-count]
    above, level = np.flatnonzero(row > least), np.flatnonzero(row == least)
    return np.sort(np.concatenate((above, level[: count - len(above)])))


def _rest(row: Half, places: Places, terms: int) -> float:
    """The value for each of the tokens that are not named, so that their joint mass under exp(row / terms) is what it was."""
    others = np.delete(row, places).astype(np.float64) / terms
    highest = float(others.max())
    return terms * (highest + float(np.log(np.exp(others - highest).mean())))
