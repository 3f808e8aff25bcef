"""What two nodes agree on, and every decision a node takes. Read in this order; an hour is enough.

errors, limits, chance  whose fault, how much is too much, and chance as an argument
ids, wire, schema       names, bytes, and strict decoding
manifest, handshake     what a run is, and whether two nodes can talk at all
records, buckets        what stands in the DHT, and under which keys
messages                what two nodes say to each other
exchange, acceptance    how two replicas average, and whether a merge may be used
pairing, patience       whom to ask for it, and whom not just now
membership, encounters  who holds what, and how it went with those whom we met
standing, placement     whose word on rounds to follow, and which block needs a holder most
chains, sweep           a chain through the blocks, and how text comes out of it
facts, core             one node's decisions: facts in, decisions out

Nothing here does I/O, reads a clock or draws from global randomness: time and chance are arguments. node/ carries the decisions out on a
real machine and swarm_sim/ in a virtual one, with this very code.
"""
