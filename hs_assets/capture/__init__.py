"""The capture plugin: runs in SGLang's schedulers, and in writer processes beside them; imports torch, `wire` and `errors` only.

plugin.py     what SGLang's entry point calls; inert without `HS_ASSETS_CAPTURE`
supported.py  the versions and model classes that passed parity, and the server flags that are refused
points.py     where to hook into a loaded model
session.py    the hooks: collect one forward pass's states
batch.py      which rows of a batch belong to which request
checksums.py  the checksum of each row, made on the device
transfer.py   from the device to shared memory, beside the forward pass
ring.py       that memory, and the writer processes that read it; messages.py: what they tell each other
writing.py    a writer process
assembly.py   one dump, chunk by chunk, up to its commit record
room.py       the spool's budget, held by the server too
monitor.py    counters, every second
"""
