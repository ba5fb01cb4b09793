"""What a row of probes means.

The stated policy: the door opens when the ready tier has passed for this very server process. It
closes after `fail_after` incoherent probes in a row, if closing is allowed at all, and opens again
after the ready tier has passed `recover_after` times in a row. An outage (nothing came, 5xx,
time-out) says nothing about coherence: it makes the canary not ready after `outage_after` probes,
and never touches the door. Neither does the canary's own end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from assay_smoke.battery import Overall

State = Literal["starting", "ready", "incoherent", "unreachable"]
STATES: tuple[State, ...] = ("starting", "ready", "incoherent", "unreachable")


@dataclass(frozen=True)
class Policy:
    fail_after: int = 3
    recover_after: int = 2
    outage_after: int = 3
    closes: bool = True

    def __post_init__(self) -> None:
        for name in ("fail_after", "recover_after", "outage_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


class Hysteresis:
    """Feed it verdicts; one blip changes nothing."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state: State = "starting"
        self.passes = self.fails = self.outages = 0

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def needs_ready_tier(self) -> bool:
        """A probe is enough while all is well; anything else has to prove more."""
        return self.state in ("starting", "incoherent")

    def restart(self) -> None:
        """Another server process: what was seen before says nothing about it."""
        self.state = "starting"
        self.passes = self.fails = self.outages = 0

    def note(self, verdict: Overall) -> State:
        """Take one probe's verdict; the state after it."""
        match verdict:
            case "pass":
                self.passes, self.fails, self.outages = self.passes + 1, 0, 0
            case "fail":
                # An outage in between neither adds to a row of failures nor breaks it.
                self.passes, self.fails, self.outages = 0, self.fails + 1, 0
            case "error":
                self.passes, self.outages = 0, self.outages + 1
        if self.state == "starting":
            self.state = {"pass": "ready", "fail": "incoherent", "error": "starting"}[verdict]  # type: ignore[assignment]
        elif verdict == "pass":
            if self.state == "ready" or self.passes >= self.policy.recover_after:
                self.state = "ready"
        elif self.fails >= self.policy.fail_after:
            self.state = "incoherent"
        elif self.outages >= self.policy.outage_after and self.state == "ready":
            self.state = "unreachable"
        return self.state
