"""The programs `blocktrain` and `blocktrain-node`. A command's module is light: it imports what does the work when it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from cyclopts import App

from blocktrain.node.commands import frame
from blocktrain.node.commands.doctor_cmd import doctor_
from blocktrain.node.commands.eval_cmd import eval_
from blocktrain.node.commands.export_cmd import export_
from blocktrain.node.commands.gateway_cmd import gateway_
from blocktrain.node.commands.generate_cmd import chat_, generate_
from blocktrain.node.commands.node_cmd import node_
from blocktrain.node.commands.settings import Settings
from blocktrain.node.commands.status_cmd import status_
from blocktrain.node.runtime import leave

HELP: Final = "Train and serve a language model together, each computer holding one block of it, with no coordinator."
NODE_HELP: Final = "Hold one block of a run: train it, average it with its other holders, and serve it."
_COMMANDS: Final[dict[str, Callable[..., int]]] = {
    "node": node_,
    "generate": generate_,
    "chat": chat_,
    "status": status_,
    "eval": eval_,
    "export": export_,
    "gateway": gateway_,
    "doctor": doctor_,
}


def blocktrain() -> App:
    """The program with all commands."""
    app = frame.new_app("blocktrain", HELP, Settings(blocktrain).sources())
    for name, command in _COMMANDS.items():
        app.command(command, name=name)
    return app


def blocktrain_node() -> App:
    """`blocktrain node` as a program of its own."""
    app = frame.new_app("blocktrain-node", NODE_HELP, Settings(blocktrain).sources())
    app.default(node_)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    return frame.run(blocktrain(), argv)


def node_main(argv: Sequence[str] | None = None) -> int:
    return frame.run(blocktrain_node(), argv)


def script() -> NoReturn:
    """The console program `blocktrain`: a process ends with its last line, without taking the interpreter apart (runtime.leave)."""
    leave(main())


def node_script() -> NoReturn:
    """The console program `blocktrain-node`."""
    leave(node_main())
