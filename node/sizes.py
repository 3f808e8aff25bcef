"""What a block of a run needs, reckoned from its manifest alone: parameters, memory, disk and bytes on the wire.

Stands apart from compute/ so that `doctor` and a node can say "this does not fit" before torch is imported. The parameter count is exact
(a test compares it with the real block); the memory is a sum of the buffers that a node holds at its peak, rounded up by what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blocktrain.protocol.manifest import Manifest

PROCESS_BYTES: Final = 450 * 1024**2  # Python with torch, and the libp2p daemon beside it
_TRAINING: Final = 16  # bytes a parameter, float32: weights, gradients, two moments
_STATES: Final = 8  # the published state and the serving copy; on a GPU, a snapshot and the serving copy
_EXCHANGE: Final = 8  # at the peak of one: our snapshot, which becomes what the live block gets, and the merge; pieces are on the way
_MOMENTUM: Final = 16  # of an outer step: anchor and velocity, and the next two while an exchange is judged
_ACTIVATIONS: Final = 60  # bytes per layer, position and width that a backward pass keeps in float32, attention recomputed
_LOGITS: Final = 12  # bytes per position and token of the vocabulary: logits, their softmax and gradient
_FOUND: Final = 16  # bytes per position and number that n-grams' rows hold: what was found, its gradient, and where
_TABLE: Final = 4  # bytes per number of the n-grams' table: the gradient of one pass, before it is added to the others
_CHECKPOINT: Final = 16  # weights, two moments, and the published state
_CHECKPOINTS: Final = 3  # the newest, the one before, and the one being written
_WINDOW_OFFSETS: Final = 63  # compute/model.py: Off, one row for each distance inside a window
_TIME: Final = 64  # compute/model.py: width of the noise level's small network
_FREQUENCIES: Final = 32  # its cosines and sines
CODEC_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "int8": 1.02}  # per parameter


@dataclass(frozen=True)
class Needs:
    """Of one node that holds one block. All in bytes but `parameters`."""

    parameters: int
    optimizer: int  # parameters, gradients and moments
    memory: int  # all of it, at the peak, process included
    gpu: int  # the part of it that lies on a GPU, where one trains
    disk: int
    exchange: int  # in each direction, of one exchange


def parameters(manifest: Manifest) -> int:
    """Parameters of one block."""
    width, layers, vocabulary = manifest.model.width, manifest.model.layers, manifest.model.vocabulary
    tables = 2 * vocabulary * width + _WINDOW_OFFSETS * width + width
    noise = width * width + _TIME * _FREQUENCIES + _TIME + width * _TIME + width
    grams = _table(manifest) + width * _found(manifest)
    return tables + noise + grams + layers * (12 * width * width + 2 * width)


def _table(manifest: Manifest) -> int:
    """Parameters of the n-grams' table."""
    return manifest.grams.rows * manifest.grams.row_width


def _found(manifest: Manifest) -> int:
    """Numbers that n-grams' rows hold together at one position."""
    return max(0, manifest.grams.longest - 1) * manifest.grams.row_width


def needs(manifest: Manifest, codec: str = "bf16") -> Needs:
    """Raises: KeyError: a codec whose size depends on the data (sparse)."""
    count = parameters(manifest)
    positions = manifest.optimizer.batch // manifest.optimizer.accumulate * manifest.model.context
    momentum = 0 if manifest.averaging.outer == "mean" else _MOMENTUM
    layers, logits = _ACTIVATIONS * manifest.model.layers * manifest.model.width, _LOGITS * manifest.model.vocabulary
    work = positions * (layers + logits + _FOUND * _found(manifest)) + _TABLE * _table(manifest)
    return Needs(
        parameters=count,
        optimizer=_TRAINING * count,
        memory=PROCESS_BYTES + (_TRAINING + _STATES + _EXCHANGE + momentum) * count + work,
        gpu=(_TRAINING + _STATES) * count + work,
        disk=_CHECKPOINTS * _CHECKPOINT * count,
        exchange=round(CODEC_BYTES[codec] * count),
    )


def training_flops(manifest: Manifest) -> float:
    """Floating-point operations of training on one token: six a parameter in matrices (forward, and twice that backward), and attention."""
    model = manifest.model
    matrices = model.layers * 12 * model.width**2 + (model.vocabulary + _found(manifest)) * model.width
    attention = model.layers * 2 * model.context * model.width  # scores and their use, half of them masked
    return 6.0 * (matrices + attention / 2)


def tokens_per_round(manifest: Manifest) -> int:
    """What one replica trains on between two merges."""
    return manifest.schedule.steps_per_round * manifest.optimizer.batch * manifest.model.context
