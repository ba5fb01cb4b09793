"""Every check, each a class of its own; importing this package fills the registry.

`answers` knows what is right, `repeat` compares answers with each other, `lengths` and `long` go
where prompts and answers get long, `probabilities` reads log-probabilities, `form` and `server`
look at every answer and at the server's own counters.
"""

from assay_smoke.checks import answers, form, lengths, long, probabilities, repeat, server
from assay_smoke.checks.base import REGISTRY, Check, Outcome, Verdict, build

__all__ = [
    "REGISTRY",
    "Check",
    "Outcome",
    "Verdict",
    "answers",
    "build",
    "form",
    "lengths",
    "long",
    "probabilities",
    "repeat",
    "server",
]
