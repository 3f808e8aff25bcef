"""One node, and the commands that ask a swarm. By what they are for:

start          runtime (event loop, clock, signals: the only place), config (every setting, once), planning and placing (which run, which
               block), launch (open everything, close it in reverse), talk and snapshot and status and local (what the user sees)
life           service (facts into the protocol core, decisions out of it), ports (what it needs from outside, as types)
a round        exchanger (an exchange), transfer (its bytes), catchup, download and shards (state instead of averaging)
a sweep        holder (a holder's side), client, traversal and legs (the client's), gateway and export (other ways to ask)
network        network (all of it, as one context), libp2p (the one file that imports hivemind) with daemon, lean, taming, sealing,
               bootstrap and dialing; transport (streams) over intake (their bytes) and room (memory for them), directory (records),
               join (from an address to a manifest), reachability, proof, identity
data           data (batches), corpus, sources, fetched, wiki, permutation, cache, tokenizer, recipe_file
disk           store, checkpoint, logs
this machine   doctor, survey, sizes, bandwidth, leftovers (of programs that were killed)
compute/       the one folder that imports torch: the block, its training thread, its serving thread
commands/      the command line
"""
