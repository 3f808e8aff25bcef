"""The tree of errors: who is at fault decides what happens next.

Ours (a bug) is a plain Python exception and ends in a traceback. Everything else is one of these and ends in one line that says
what, where and how to mend it: the configuration's (`UsageError`), the machine's (`DoesNotFit`), the network's (`NetworkFault`,
`Unreachable`, `NoPeers`), the swarm's (`RefusedBySwarm`) and a single peer's (`PeerFault`, which names the peer and is counted
against it). `exit_code` is what a command exits with when the error ends it (docs/commands.md).
"""

from __future__ import annotations


class BlocktrainError(Exception):
    """Base of every error that we expect. Its text is one line for a person."""

    exit_code = 1


class UsageError(BlocktrainError):
    """The command line, a file given by the user, or the local store is wrong."""

    exit_code = 2


class Unreachable(BlocktrainError):
    """No initial peer could be reached, or our own address cannot be used."""

    exit_code = 3


class NoPeers(BlocktrainError):
    """The swarm was reached but nobody holds what is needed."""

    exit_code = 4


class DoesNotFit(BlocktrainError):
    """The block, or what it needs, does not fit this machine."""

    exit_code = 5


class RefusedBySwarm(BlocktrainError):
    """The swarm runs something that we cannot join: protocol version, run, clock."""

    exit_code = 6


class NetworkFault(BlocktrainError):
    """A stream ended or a deadline passed. Nobody need be at fault; the peer is put off for a while."""

    exit_code = 3


class PeerFault(BlocktrainError):
    """A peer broke the agreement. Counted against `peer`; nothing that it sent is used.

    Attributes:
        peer: the offender's peer id, or "" where the stream's edge adds it later.
        why: the broken rule, in a few words.
    """

    def __init__(self, why: str, peer: str = "") -> None:
        super().__init__(f"{peer}: {why}" if peer else why)
        self.peer = peer
        self.why = why

    def by(self, peer: str) -> PeerFault:
        """The same fault with the peer's name on it."""
        return type(self)(self.why, peer)


class Malformed(PeerFault):
    """Bytes that are not what the protocol says: wrong type, out of bounds, too long, trailing."""


class Incompatible(PeerFault):
    """A peer of another protocol version, run or σ partition. Not hostile; refused once, with field, ours and theirs."""


class Unfit(PeerFault):
    """A whole and well-formed snapshot whose merge would not help us. Honest replicas that trained apart can come to this: the peer is put
    off like after a failed call, for longer each time, and not banned."""
