"""One node: the network, the block, the store, and what the user sees.

runtime    the one place that starts uvloop, reads the real clock and draws the seed
config     every setting of a node, with its default, once
ports      what the service needs from the outside world, as types; tests and simulators bring their own
libp2p     the one file that imports hivemind; identity, directory and transport stand on it
compute/   the one folder that imports torch: the block, its training and its serving thread
store      what survives a restart
service    one node's life: facts into the protocol core, decisions out of it
status     what a node can say about itself, in plain words
commands/  the command line
"""
