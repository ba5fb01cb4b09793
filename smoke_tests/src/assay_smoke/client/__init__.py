"""A lean client of OpenAI-compatible servers that believes nothing it reads.

What cannot be reached, breaks off or refuses raises an error of `assay_smoke.errors`. What arrives
whole becomes an `Answer`, with everything that was wrong with it listed in `Answer.problems`.
"""

from assay_smoke.client.answer import Answer, Token, ToolCall
from assay_smoke.client.http import Client, Secrets, Timeouts
from assay_smoke.client.metrics import Metrics

__all__ = ["Answer", "Client", "Metrics", "Secrets", "Timeouts", "Token", "ToolCall"]
