"""What two nodes agree on, and every decision a node takes. Read in this order; an hour is enough.

errors, limits          whose fault, and how much is too much
ids, wire, schema       names, bytes, and strict decoding
manifest                what a run is
records                 what stands in the DHT
messages                what two nodes say to each other
exchange, pairing       how two replicas average, and whom to ask
membership, chains      who holds what, and a chain through it
sweep                   how text comes out of a chain
core                    one node's decisions: facts in, decisions out

Nothing here does I/O, reads a clock or draws from global randomness: time and chance are arguments. node/ carries the decisions out on a
real machine and swarm_sim/ in a virtual one, with this very code.
"""
