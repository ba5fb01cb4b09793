"""Starts vLLM with the plugin, opens its door only once it is proven, and leaves nothing behind.

`serve.py` is the flow; the rest are its parts: `host` looks at the machine, `guard` is the small
process that owns vLLM, `processes` compares what runs with what has proven itself, `logfile` reads
reasons out of vLLM's log, `client` looks whether the server is there, `ready` has
it asked a suite before the door opens.
"""
