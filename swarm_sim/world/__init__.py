"""A swarm in virtual time: the protocol core that nodes run, with simulated network, DHT, clocks and compute around it."""
