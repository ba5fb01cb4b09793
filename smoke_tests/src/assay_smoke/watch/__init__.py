"""The canary: keeps probing a server at a low rate, opens its door, and tells what it sees.

`policy` decides what a row of probes means, `heartbeat` tells a busy engine from a dead one, `door`
opens and closes, `exporter` answers `/readyz`, `/healthz` and `/metrics`, `canary` is the loop.
"""
