"""A server that goes wrong on purpose: OpenAI-compatible, deterministic but for what a fault draws,
without a model.

`tokens` is its tokenizer, `model` what it says while nothing is wrong, `modes` the ways to break
that, `server` the HTTP around it. It exists so that a battery can be seen to bite.
"""
