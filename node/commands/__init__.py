"""The command line: what a person types becomes a config, and the config is handed to one function.

frame      what every program shares: settings from flags, environment and file; one line and an exit code for every expected error
app        the programs `blocktrain` and `blocktrain-node`
*_cmd      one command each: check what can be checked cheaply, then import what does the work

Nothing here imports torch, hivemind or numpy before a command has decided to do its work, so `--help` stays quick.
"""
