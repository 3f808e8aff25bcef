"""Many nodes on one machine: the swarm of real processes, and the benches that measure it.

app          the program `blocktrain-sim`
leash        how a child process starts: it ends when we do
processes    children: their status lines, logs, signals, and the proof that none is left
cluster      the nodes of one run as children: a host, its joiners, what they say of themselves
local        `blocktrain-sim local`: the whole life of a swarm in a few minutes, each step checked
display      what a person sees of it: a live table, or plain lines
report       what it came to: the summary, the JSON, the verdict
plots        pictures of it
benches      the list of benches, and what they share: parts, tables, flat JSON
bench_node   what being a node costs
bare_loop    the same training without a node, for comparison

Nothing here reaches into a node: it sees what a user sees, status lines, logs and exit codes.
"""
