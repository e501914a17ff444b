"""The server's life: one long-lived SGLang process for all runs of a home.

spec.py       the state spec: what changes the numbers, and its fingerprint
engine.py     the CPU engine's environment: install, stamp
launch.py     the command, environment and plugin path of a server
state.py      the state file and the leases
failed_start.py  the last start that failed, for the runs that come after it
server.py     start, share, stop: what runs and commands call
liveness.py   whether a server that was up still is
handshake.py  what a server says of itself, compared with what was asked for
by_hand.py    how to start a server by hand
attach.py     a server that somebody else started
watchdog.py   the process that owns SGLang: ready, canary, idle stop
canary.py     three prompts that prove a fresh server
admission.py  bytes in flight never exceed the spool
client.py     one request: trigger, wait for the dump
generate.py   ask for answers: ids in, ids out
"""
