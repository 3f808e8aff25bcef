"""A stand-in for `blocktrain-node` and `blocktrain`, for tests of what supervises them. It needs no network and no torch.

    fake_node.py FAULTS node --block B … --json      status lines like a node's, ten a second
    fake_node.py FAULTS client eval|generate …       one JSON object

Nodes of one run find each other through files in the folder `../peers` of their stores. FAULTS is a JSON object: label → fault, where a
node's label is its --name, a client's its command. Faults are named where they act.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

STEP_S = 0.05
STEPS_PER_ROUND = 4


class Node:
    def __init__(self, arguments: argparse.Namespace, fault: str) -> None:
        self.arguments = arguments
        self.fault = fault
        self.peers = Path(arguments.store).parent / "peers"
        self.peers.mkdir(parents=True, exist_ok=True)
        self.me = self.peers / f"{arguments.block}-{os.getpid()}"
        self.paused = arguments.paused
        self.asked_to_stop = False
        self.steps = 0
        self.round = 0
        self.accepted = 0

    def live(self) -> int:
        signal.signal(signal.SIGINT, self.on_stop)
        signal.signal(signal.SIGUSR1, self.on_resume)
        if self.fault == "ends at once":
            print("error: no such block", file=sys.stderr)
            return 2
        if self.fault == "leaves a daemon":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        if self.fault == "logs a traceback":
            print("Traceback (most recent call last):\n  ...\nValueError: 3", file=sys.stderr)
        while not self.asked_to_stop:
            self.step()
            if self.fault == "ends in the middle" and self.steps > 10:
                print("error: the disk is full", file=sys.stderr)
                return 1
            if self.fault == "falls silent" and self.steps > 2:
                time.sleep(60)
            time.sleep(STEP_S)
        self.me.unlink(missing_ok=True)
        print(json.dumps(self.status("stopping")), flush=True)
        return 3 if self.fault == "stops badly" else 0

    def step(self) -> None:
        others = self.others()
        if not self.paused:
            self.steps += 1
            if self.steps % STEPS_PER_ROUND == 0:
                partners = [round for block, round in others if block == self.arguments.block]
                self.accepted += bool(partners) and self.fault != "never averages"
                self.round = max([self.round, *partners]) + 1
            elif self.steps == 1 and self.fault != "never catches up":
                self.round = max([round for block, round in others if block == self.arguments.block], default=0)
                print(f"12:03:44 info  downloaded the state of round {self.round}", file=sys.stderr)
        beside = self.peers.parent / self.me.name
        beside.write_text(str(self.round))
        beside.replace(self.me)
        if self.fault == "talks rubbish":
            print("this is no status\n[1, 2]\n{broken", flush=True)
        print(json.dumps(self.status("paused" if self.paused else "training")), flush=True)

    def others(self) -> list[tuple[int, int]]:
        """(block, round) of every other node that is alive."""
        found = []
        for path in self.peers.iterdir():
            block, pid = map(int, path.name.split("-"))
            if path != self.me and Path(f"/proc/{pid}").exists():
                with contextlib.suppress(FileNotFoundError):  # it has just left
                    found.append((block, int(path.read_text())))
        return found

    def status(self, phase: str) -> dict[str, Any]:
        peers = [] if self.fault == "sees nobody" else [{"peer": f"p{block}", "block": block} for block, _ in self.others()]
        return {
            "name": self.arguments.name,
            "pid": os.getpid(),
            "block": self.arguments.block,
            "phase": phase,
            "peers": peers,
            "addresses": ["/ip4/127.0.0.1/tcp/4242/p2p/12D3KooFake"],
            "round": self.round,
            "steps": self.steps,
            "tokens": self.steps * 1024,
            "loss": 5.5 / (1 + self.steps / 50),
            "heldout": None,
            "accepted": self.accepted,
            "late": 0,
            "refused": 0,
            "one_sided": 0,
            "tokens_per_s": 3000.0,
            "bytes_in": 1_500_000,
            "bytes_out": 1200,
            "written_at": time.time(),
        }

    def on_stop(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop = self.fault != "does not stop"

    def on_resume(self, number: int, frame: FrameType | None) -> None:
        self.paused = False


def client(command: str, arguments: argparse.Namespace, fault: str) -> int:
    """The loss falls with every evaluation: a file next to the logs counts them."""
    if fault == "fails":
        print("error: nobody holds block 1", file=sys.stderr)
        return 4
    if command == "generate":
        text = "x" * arguments.max_tokens
        print(json.dumps({"text": text, "bytes": len(text), "traversals": max(1, len(text) // 5), "mode": "speculative"}))
        return 0
    count = Path("evaluations")
    done = len(count.read_text()) if count.exists() else 0
    count.write_text("x" * (done + 1))
    print(json.dumps({"loss": 5.5 if fault == "no progress" else 5.5 - done, "blocks": [5.6 - done] * 3, "windows": 4}))
    return 0


def main() -> int:
    faults, role = json.loads(sys.argv[1]), sys.argv[2]
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="?")
    parser.add_argument("--block", type=int, default=0)
    parser.add_argument("--store")
    parser.add_argument("--name", default="")
    parser.add_argument("--paused", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=0)
    arguments, _ = parser.parse_known_args(sys.argv[3:])
    if role == "node":
        return Node(arguments, faults.get(arguments.name, "")).live()
    return client(arguments.command, arguments, faults.get(arguments.command, ""))


if __name__ == "__main__":
    sys.exit(main())
