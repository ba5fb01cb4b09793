"""What a server says of itself on `/metrics`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Metrics:
    """Sums over all label sets of each sample name."""

    sums: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """What can be read of an exposition; a broken line ends the reading, it does not raise."""
        sums: dict[str, float] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    value = float(sample.value)
                    if math.isfinite(value):
                        sums[sample.name] = sums.get(sample.name, 0.0) + value
        except Exception:  # the parser raises whatever its regular expressions lead to
            return cls(sums)
        return cls(sums)

    def get(self, *names: str) -> float | None:
        """The first of `names` that the server has."""
        return next((self.sums[name] for name in names if name in self.sums), None)

    @property
    def running(self) -> float | None:
        return self.get("vllm:num_requests_running")

    @property
    def waiting(self) -> float | None:
        return self.get("vllm:num_requests_waiting")

    @property
    def iterations(self) -> float | None:
        """Steps that the engine has made."""
        return self.get("vllm:iteration_tokens_total_count")

    @property
    def corrupted(self) -> float | None:
        """Requests whose logits held NaN; None unless VLLM_COMPUTE_NANS_IN_LOGITS=1."""
        return self.get("vllm:corrupted_requests_total", "vllm:corrupted_requests")

    @property
    def started(self) -> float | None:
        """Seconds since the epoch: another value is another server."""
        return self.get("process_start_time_seconds")
