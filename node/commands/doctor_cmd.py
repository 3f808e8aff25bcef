"""`blocktrain doctor`: whether this machine can hold a block, and how to mend what is in the way."""

from __future__ import annotations

from blocktrain.node.commands.settings import ConfigFile
from blocktrain.node.config import DoctorConfig


def doctor_(wanted: DoctorConfig | None = None, *, config: ConfigFile = None) -> int:
    """Check this machine before it joins: device, memory, disk, data, clock, limits, ports, versions and each initial peer.

    Every line ends in ok, warn or fail, the last two with the way to mend it. Exit code 0 means that nothing failed.
    """
    from blocktrain.node import doctor

    return doctor.show(wanted or DoctorConfig())
