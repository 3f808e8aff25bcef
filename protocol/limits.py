"""Every bound on what a peer can make us hold, send or wait for, each with its reason."""

from __future__ import annotations

from typing import Final

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1

MAX_TOKEN_BYTES: Final = 64 * 1024  # of the tokens in one message: the longest context of bytes
MAX_HEADER_BYTES: Final = MAX_TOKEN_BYTES + 4096  # a header holds ids, numbers, the tokens, and at most MAX_CHAIN block numbers
MAX_BODY_BYTES: Final = 4 * 1024 * 1024  # one frame's raw bytes: 8 windows of dense log-probabilities, several chunks
CHUNK_BYTES: Final = 512 * 1024  # bulk transfers: large enough for throughput, small enough for the loop (facts §3)
MAX_STATE_BYTES: Final = 64 * 1024**3  # one part in fp32; above that a block is misconfigured
MAX_MANIFEST_BYTES: Final = 16 * 1024

MAX_ANNOUNCEMENT_BYTES: Final = 400  # ten thousand of them must stay cheap for the DHT
MAX_RUNS_LISTED: Final = 64  # runs that a bootstrap peer can make a joiner look at
MAX_BUCKETS: Final = 64  # DHT keys over which one block's replicas are spread
MAX_ADDRESSES: Final = 2  # addresses in an announcement
MAX_ADDRESS_CHARS: Final = 128  # IPv6 through a relay has 122
MAX_WHOLE_ADDRESS_CHARS: Final = 256  # the same with the peer id behind it, in an answer or a question: 180; names are longer
MAX_RECORD_LIFE_S: Final = 120.0  # an announcement cannot outlive its peer by more than this, whatever it claims
MAX_MEMBERS: Final = 4096  # peers of one run that a node remembers

MAX_BLOCKS: Final = 1024
MAX_TEXT_CHARS: Final = 300  # reasons, names and other words from peers
MAX_CHAIN: Final = MAX_BLOCKS

TTL_S: Final = 30.0  # an announcement's life
REFRESH_S: Final = 10.0  # three tries before it ends
MAX_CLOCK_SKEW_S: Final = 10.0  # above it records expire at once or linger; the node is told to mend its clock

MAX_STREAMS_IN: Final = 64  # inbound streams served at once, over all peers
MAX_STREAMS_PER_PEER: Final = 16  # inbound streams served at once for one peer
MAX_SESSIONS: Final = 32  # sweep sessions whose cache a holder keeps
SESSION_IDLE_S: Final = 60.0  # a session nobody used for this long is evicted

OPEN_TIMEOUT_S: Final = 10.0  # to open a stream and get the first answer
TAU_S: Final = 20.0  # τ: an exchange takes at most this long, then it is late
HOP_TIMEOUT_S: Final = 10.0  # one hop of a sweep
STATE_TIMEOUT_S: Final = 600.0  # a whole download of state
STALL_TIMEOUT_S: Final = 10.0  # no byte for this long inside a transfer: the other side is gone
