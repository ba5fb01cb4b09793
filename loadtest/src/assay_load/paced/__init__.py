"""Test tools: a server that streams at a known pace, and a proxy that adds faults to a real one."""
