"""How often each fault is caught: fresh parameters and seeds for every draw.

    assay-smoke detection --draws 20 --good 100 --out docs/results/smoke-detection.json

A fault meets the checks of the default tier that are meant for it; the good mode and the outages
meet them all. Nothing is tuned on what is drawn here: parameters come from the operating system's
generator at the time of the run, within the bounds that each mode states in its `draw`.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assay_smoke import reference, suite
from assay_smoke.battery import Battery, Plan, Report
from assay_smoke.client import Client
from assay_smoke.errors import SuiteError
from assay_smoke.faults import modes
from assay_smoke.faults.server import FaultServer, Running
from assay_smoke.stats import percent, wilson

GOOD = "good"


@dataclass(frozen=True)
class Draw:
    """One run of the battery against one broken server."""

    mode: str
    seed: int
    params: dict[str, Any]
    verdict: str
    failed: list[str]
    """Checks that failed."""
    caught: bool
    """By a check that is meant to, or as the outage that it is."""
    tokens: int
    seconds: float


@dataclass
class Row:
    """All draws of a mode."""

    mode: str
    meant: list[str]
    draws: list[Draw] = field(default_factory=list)

    @property
    def caught(self) -> int:
        return sum(draw.caught for draw in self.draws)

    @property
    def not_passed(self) -> int:
        return sum(draw.verdict != "pass" for draw in self.draws)

    def to_json(self) -> dict[str, Any]:
        low, high = wilson(self.caught, len(self.draws))
        return {
            "mode": self.mode,
            "meant": self.meant,
            "caught": self.caught,
            "draws": len(self.draws),
            "interval": [round(low, 4), round(high, 4)],
            "mean_tokens": round(sum(d.tokens for d in self.draws) / max(1, len(self.draws))),
            "runs": [asdict(draw) for draw in self.draws],
        }


def with_patience(chosen: suite.Suite, mode: str) -> suite.Suite:
    """The suite with other time-outs: none for a server that only lies, however busy this machine
    is; short ones where the fault is that nothing comes."""
    outage = mode != GOOD and not modes.MODES[mode].meant
    patience: dict[str, float] = (
        {"idle_timeout": 20, "request_timeout": 60, "deadline": 240}
        if outage
        else {"idle_timeout": 300, "request_timeout": 600, "deadline": 1800}
    )
    tier = chosen.tier("default").model_copy(update=patience)
    return chosen.model_copy(update={"tiers": {**chosen.tiers, "default": tier}})


# A check that only looks at what others asked is given somebody to ask, and no more than it needs.
ASKING = {"known-answers", "stream-equals-whole"}
LONG = {"rescoring", "repetition", "script-mix", "greedy-choice", "acceptance-length"}


def checks_for(mode: str) -> tuple[str, ...]:
    """The checks meant for a fault and those that ask for them; else every one."""
    meant = set(modes.MODES[mode].meant)
    if not meant:
        return ()
    return tuple(meant | ASKING | ({"long-generation"} if meant & LONG else set()))


def judged(mode: str, report: Report) -> bool:
    """Whether the run says of the mode what is to be said."""
    if mode == GOOD:
        return report.verdict == "pass"
    meant = modes.MODES[mode].meant
    failed = {r.name for r in report.results if r.outcome.verdict == "fail"}
    if not meant:
        return report.verdict == "error" and not failed
    return report.verdict == "fail" and bool(failed & set(meant))


async def draw(mode: str, seed: int, suite_name: str, recorded: Path) -> Draw:
    """Run the default tier's checks for `mode` against a server broken as `seed` draws it."""
    chosen = with_patience(suite.load(suite_name), mode)
    broken = modes.build(mode, {}, seed)
    began = time.monotonic()
    async with Running(FaultServer(chosen, broken)) as url:
        plan = Plan(
            chosen, "default", url, seed=seed ^ 0x5EED, only=checks_for(mode),
            reference=reference.read(recorded, chosen),
        )  # fmt: skip
        report = await Battery(plan).run()
    return Draw(
        mode,
        seed,
        broken.params.model_dump(),
        report.verdict,
        [r.name for r in report.results if r.outcome.verdict == "fail"],
        judged(mode, report),
        report.generated_tokens,
        round(time.monotonic() - began, 2),
    )


def draw_alone(arguments: tuple[str, int, str, Path]) -> Draw:
    """One draw, in whatever process this is called in."""
    return asyncio.run(draw(*arguments))


async def record_good(suite_name: str, path: Path) -> None:
    """A reference recorded from the good fault server: it is no model of the suite's own."""
    chosen = suite.load(suite_name)
    async with (
        Running(FaultServer(chosen, modes.build(GOOD, {}, 1))) as url,
        Client(url) as client,
    ):
        await client.find_model()
        reference.write(await reference.record(client, chosen), path)


def run(
    suite_name: str, draws: int, good: int, only: list[str], jobs: int, seed: int | None
) -> Iterator[Row]:
    """Rows as they are finished."""
    rng = random.SystemRandom() if seed is None else random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(jobs) as pool,
        # An outage is waited for: many can be at once.
        ProcessPoolExecutor(8 * jobs) as waiting,
    ):
        recorded = Path(folder, "reference.json")
        asyncio.run(record_good(suite_name, recorded))
        for name, mode in modes.MODES.items():
            if only and name not in only:
                continue
            count = good if name == GOOD else draws
            work = [(name, rng.randrange(2**32), suite_name, recorded) for _ in range(count)]
            busy = pool if mode.meant or name == GOOD else waiting
            yield Row(name, list(mode.meant), list(busy.map(draw_alone, work)))


def words(row: Row) -> str:
    """One aligned line."""
    low, high = wilson(row.caught, len(row.draws))
    tokens = sum(d.tokens for d in row.draws) / max(1, len(row.draws))
    also = Counter(name for d in row.draws for name in d.failed if name not in row.meant)
    line = (
        f"{row.mode:<18} {row.caught:>3} of {len(row.draws):<3} {percent(low):>7} to"
        f" {percent(high):<7} {tokens:>6.0f} tokens  {', '.join(row.meant) or '-'}"
    )
    if also:
        line += f"  (also {', '.join(n for n, _ in also.most_common(3))})"
    return line


def markdown(rows: list[Row]) -> str:
    """The table of the documentation."""
    lines = [
        "| mode | meant for it | caught | 95 % interval | tokens spent |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = wilson(row.caught, len(row.draws))
        tokens = sum(d.tokens for d in row.draws) / max(1, len(row.draws))
        meant = ", ".join(f"`{n}`" for n in row.meant) or "exit code 2"
        caught = f"{row.caught} of {len(row.draws)}"
        if row.mode == GOOD:
            meant, caught = "passes", f"{caught} pass"
        lines.append(
            f"| `{row.mode}` | {meant} | {caught} | {percent(low)} to {percent(high)}"
            f" | {tokens:,.0f} |"
        )
    return "\n".join(lines)


BEGIN, END = "<!-- detection -->", "<!-- /detection -->"


def into_document(path: Path, rows: list[Row]) -> None:
    """Replace what stands between the marks."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SuiteError(f"{path} has no {BEGIN} ... {END}")
    path.write_text(f"{before}{BEGIN}\n{markdown(rows)}\n{END}{after}")


def to_json(rows: list[Row]) -> str:
    return json.dumps({"rows": [row.to_json() for row in rows]}, indent=1) + "\n"
