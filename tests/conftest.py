"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# No limit on one example's time: a busy machine is not a bug. A failure prints the line that replays it.
settings.register_profile("blocktrain", deadline=None, print_blob=True, database=None)
settings.load_profile("blocktrain")
