"""What must hold in every world, whatever befalls it: one checker a file. They watch, and change nothing."""

from __future__ import annotations

from typing import Final

from blocktrain.swarm_sim.world.checkers.base import Checker, Violation
from blocktrain.swarm_sim.world.checkers.consensus import Consensus
from blocktrain.swarm_sim.world.checkers.coverage import Coverage
from blocktrain.swarm_sim.world.checkers.kept import Kept
from blocktrain.swarm_sim.world.checkers.order import Order
from blocktrain.swarm_sim.world.checkers.progress import Progress
from blocktrain.swarm_sim.world.checkers.traffic import Traffic
from blocktrain.swarm_sim.world.checkers.verified import Verified
from blocktrain.swarm_sim.world.checkers.views import Views
from blocktrain.swarm_sim.world.checkers.waits import Waits

ALL: Final[tuple[type[Checker], ...]] = (Order, Verified, Coverage, Kept, Views, Consensus, Waits, Traffic, Progress)

__all__ = ["ALL", "Checker", "Violation"]
