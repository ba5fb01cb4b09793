"""Checks of what the server counts about itself."""

from __future__ import annotations

from assay_smoke.checks.base import Check, Outcome
from assay_smoke.client import Metrics
from assay_smoke.lab import Lab
from assay_smoke.suite import Count, Positive, Strict


class CorruptedRequests(Check):
    """vLLM's own count of requests whose logits held NaN.

    It sees every request, also those of clients. The server keeps it only with
    VLLM_COMPUTE_NANS_IN_LOGITS=1; without, there is nothing to check.
    """

    name = "corrupted-requests"
    stage = "transcript"
    Params = Strict
    before: Metrics | None = None

    async def prepare(self, lab: Lab) -> None:
        self.before = await lab.client.metrics()

    async def run(self, lab: Lab) -> Outcome:
        after = await lab.client.metrics()
        if after is None or after.corrupted is None:
            return Outcome("skip", "the server does not count them (VLLM_COMPUTE_NANS_IN_LOGITS)")
        restarted = self.before is not None and self.before.started != after.started
        earlier = 0.0 if self.before is None or restarted else (self.before.corrupted or 0.0)
        delta = after.corrupted - earlier
        if delta > 0:
            return Outcome("fail", f"{delta:g} requests with NaN logits", "", {"corrupted": delta})
        return Outcome("pass", "no request with NaN logits", "one request", {"corrupted": 0.0})


class AcceptanceLength(Check):
    """Tokens that a step of speculative decoding yields.

    Drafts come from the MTP layer; when its weights are wrong, answers stay right, since the target
    model checks them, and only the acceptance falls: 2.8 with three drafts is usual (SGLang).
    """

    name = "acceptance-length"
    stage = "transcript"
    before: Metrics | None = None

    class Params(Strict):
        at_least: Positive
        """Mean tokens per step, the model's own included."""
        min_drafts: Count = 200

    params: Params

    async def prepare(self, lab: Lab) -> None:
        self.before = await lab.client.metrics()

    async def run(self, lab: Lab) -> Outcome:
        after = await lab.client.metrics()
        drafts = self._delta(after, "vllm:spec_decode_num_drafts_total")
        accepted = self._delta(after, "vllm:spec_decode_num_accepted_tokens_total")
        if drafts is None or accepted is None:
            return Outcome("skip", "the server does not speculate")
        if drafts < self.params.min_drafts:
            return Outcome("unsure", f"not enough samples: {drafts:g} drafts")
        length = 1 + accepted / drafts
        words = (
            f"{length:.2f} tokens a step over {drafts:g} drafts, at least {self.params.at_least:g}"
        )
        figures = {"acceptance_length": length, "drafts": drafts}
        detects = f"a length below {self.params.at_least:g}"
        verdict = "pass" if length >= self.params.at_least else "fail"
        return Outcome(verdict, words, detects, figures)  # type: ignore[arg-type]

    def _delta(self, after: Metrics | None, name: str) -> float | None:
        now = after.get(name) if after else None
        if now is None:
            return None
        earlier = (self.before.get(name) if self.before else None) or 0.0
        return now - earlier if now >= earlier else now
