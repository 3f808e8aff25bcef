"""Start of a child process: `python -m blocktrain.swarm_sim.leash NICENESS PROGRAM ARGUMENTS…` becomes that program, tied to its parent.

Should the simulator be killed without a chance to clean up, the kernel sends each child a SIGINT, on which a node stops in order. And
children run at a lower priority, so that the machine's owner, and the clients that ask the swarm, do not wait behind six trainings.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import Final

PROGRAMS: Final = ("blocktrain", "blocktrain-node", "bare-loop", "liar-node")
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Ask Linux for a SIGINT when our parent ends. Elsewhere a killed parent leaves its children to the user."""
    parent = os.getppid()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as all have it whom a script starts with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGINT)  # it ended before we had asked


def main() -> None:
    niceness, program = int(sys.argv[1]), sys.argv[2]
    end_with_parent()
    if niceness:
        os.nice(niceness)
    sys.argv = [program, *sys.argv[3:]]
    from blocktrain.node import runtime

    if program == "blocktrain-node":
        from blocktrain.node.commands.app import node_main

        runtime.leave(node_main())
    elif program == "blocktrain":
        from blocktrain.node.commands.app import main as client_main

        runtime.leave(client_main())
    elif program == "bare-loop":
        from blocktrain.swarm_sim.bare_loop import main as bare_main

        runtime.leave(bare_main())
    elif program == "liar-node":
        from blocktrain.swarm_sim.liar import main as liar_main

        runtime.leave(liar_main())
    else:
        sys.exit(f"no such program: {program}; there are {', '.join(PROGRAMS)}")


if __name__ == "__main__":
    main()
