"""blocktrain: train and serve a language model together, each computer holding one block of it, with no coordinator.

The three rooms: `blocktrain.protocol` (what two nodes agree on, no I/O), `blocktrain.node` (one node) and
`blocktrain.swarm_sim` (many nodes on one machine). docs/architecture.md draws how they fit.
"""

__version__ = "0.1.0"
