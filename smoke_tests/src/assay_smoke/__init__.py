"""Is a served language model coherent? One program, three uses: a one-shot battery, a canary that
opens the closed door and keeps probing, and a server that goes wrong on purpose."""

__version__ = "0.1.0"
