"""Tabs in Locust's web UI: TTFT, inter-token latency, tokens/s and the server's own series."""

from __future__ import annotations

import json
from typing import Any

from flask import request

from assay_load.drive.loadtest import LoadTest
from assay_load.measure.histogram import Histogram
from assay_load.report.result import Figures, merged

PERCENTILES = (50, 90, 95, 99)
_LATENCY = [
    ("name", "Class"), ("count", "Count"), *((f"p{p}", f"{p}%ile (ms)") for p in PERCENTILES),
    ("max", "Max (ms)"),
]  # fmt: skip
TABLES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "ttft": ("TTFT", _LATENCY),
    "itl": ("ITL", _LATENCY),
    "tokens": (
        "Tokens/s",
        [
            ("name", "Class"), ("output", "Output tokens/s"), ("total", "All tokens/s"),
            ("goodput", "Goodput (req/s)"), ("good", "Within SLO (%)"),
            ("tpot", "TPOT 50%ile (ms)"),
        ],
    ),
    "server": (
        "Server",
        [
            ("name", "Series"), ("now", "Now"), ("largest", "Largest"),
        ],
    ),
}  # fmt: skip


def extend(web_ui: Any, test: LoadTest) -> None:
    """Add the tabs, before the web UI starts to answer."""
    memory = Memory(test)
    web_ui.template_args["extended_tabs"] = [
        {"title": title, "key": key} for key, (title, _) in TABLES.items()
    ]
    web_ui.template_args["extended_tables"] = [
        {"key": key, "structure": [{"key": k, "title": t} for k, t in columns]}
        for key, (_, columns) in TABLES.items()
    ]

    @web_ui.app.after_request
    def add_our_rows(response: Any) -> Any:
        if request.path.endswith("/stats/requests") and response.is_json:
            rows = [{"key": key, "data": data} for key, data in memory.tables().items()]
            response.set_data(json.dumps(response.get_json() | {"extended_stats": rows}))
        return response


class Memory:
    """The rows of the run that goes on; when it is over, of the last one."""

    def __init__(self, test: LoadTest) -> None:
        self._test = test
        self._last: dict[str, list[dict[str, Any]]] = {key: [] for key in TABLES}

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        conductor = self._test.conductor
        if conductor is not None:
            groups = conductor.tally.groups
            names = sorted({name for _, name in groups})
            rows = {n: merged(g for (_, name), g in groups.items() if name == n) for n in names}
            if len(rows) > 1:
                rows["All"] = merged(groups.values())
            figures = {name: Figures.of("", name, group) for name, group in rows.items()}
            self._last = {
                "ttft": [_latency(n, g.histogram("ttft")) for n, g in rows.items()],
                "itl": [_latency(n, g.histogram("itl")) for n, g in rows.items()],
                "tokens": [_tokens(n, f) for n, f in figures.items()],
                "server": _server([s.values for s in conductor.sampler.samples]),
            }
        return self._last


def _latency(name: str, histogram: Histogram) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "count": histogram.count}
    row |= {f"p{p}": _round(histogram.percentile(p)) for p in PERCENTILES}
    largest = histogram.largest
    return row | {"max": _round(largest / 1000 if largest is not None else None)}


def _tokens(name: str, figures: Figures) -> dict[str, Any]:
    tpot = figures.metrics.get("tpot")
    return {
        "name": name,
        "output": _round(figures.output_tokens_per_second),
        "total": _round(figures.total_tokens_per_second),
        "goodput": _round(figures.goodput),
        "good": _round(100 * figures.good_share),
        "tpot": _round(tpot.p50 if tpot else None),
    }


def _server(samples: list[dict[str, float]]) -> list[dict[str, Any]]:
    if not samples:
        return []
    return [
        {
            "name": name,
            "now": _round(samples[-1][name]),
            "largest": _round(max(s.get(name, 0.0) for s in samples)),
        }
        for name in sorted(samples[-1])
    ]


def _round(value: float | None) -> float | str:
    return "" if value is None else round(value, 2)
