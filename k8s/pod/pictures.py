"""Draws a dashboard's panels from what a Prometheus answers to their queries: not Grafana, but the
same questions and the same answers.

    python k8s/pod/pictures.py URL FOLDER       FOLDER/dashboard-operator.png, dashboard-release.png
"""

from __future__ import annotations

import json
import math
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
from monitoring import Prometheus

matplotlib.use("Agg")
import matplotlib.dates as dates
import matplotlib.pyplot as plt

DASHBOARDS = Path(__file__).resolve().parents[1] / "chart/dashboards"
COLUMNS = 3
VARIABLES = {"$release": ".*", "$pod": ".*", "$__rate_interval": "1m"}
"""Grafana's: everything that is chosen, and four scrape intervals."""


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def panels(dashboard: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DASHBOARDS / f"{dashboard}.json").read_text())[
        "panels"
    ]
    return [panel for panel in found if panel["type"] != "row"]


def legend(pattern: str, labels: dict[str, str]) -> str:
    text = re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], ""), pattern).strip()
    return text if len(text) < 40 else text[:38] + ".."


def draw(source: Prometheus, dashboard: str, target: Path, seconds: float = 900) -> int:
    """Panels with an answer."""
    every = panels(dashboard)
    rows = math.ceil(len(every) / COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(15, 2.3 * rows), squeeze=False)
    drawn = 0
    for axis, panel in zip(axes.flat, every, strict=False):
        axis.set_title(panel["title"], fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
        lines = 0
        for target_ in panel["targets"]:
            expression = filled(target_["expr"])
            if panel["type"] in ("stat", "table"):
                for row in source.query(expression):
                    name = legend(target_["legendFormat"], row["metric"])
                    words = f"{name}  {float(row['value'][1]):g}"
                    x, y = 0.02 + 0.5 * (lines // 8), 0.9 - 0.11 * (lines % 8)
                    axis.text(x, y, words, fontsize=7, transform=axis.transAxes)
                    lines += 1
            else:
                for row in source.range(expression, seconds, 5):
                    times = [datetime.fromtimestamp(float(t), UTC) for t, _ in row["values"]]
                    values = [float(v) for _, v in row["values"]]
                    axis.plot(times, values, linewidth=1, drawstyle="steps-post",
                              label=legend(target_["legendFormat"], row["metric"]))  # fmt: skip
                    lines += 1
        if not lines:
            axis.text(0.5, 0.5, "no series here", ha="center", va="center", fontsize=8,
                      color="grey", transform=axis.transAxes)  # fmt: skip
        if panel["type"] in ("stat", "table") or not lines:
            axis.set_xticks([])
            axis.set_yticks([])
        else:
            axis.xaxis.set_major_locator(dates.AutoDateLocator(maxticks=5))
            axis.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))
            axis.set_ylim(bottom=-0.04 * axis.get_ylim()[1])  # a line at 0 can be seen
            axis.legend(fontsize=6, loc="upper left", ncols=2)
        drawn += bool(lines)
    for axis in list(axes.flat)[len(every) :]:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(target, dpi=80)
    plt.close(figure)
    return drawn


if __name__ == "__main__":
    for name in ("operator", "release"):
        path = Path(sys.argv[2]) / f"dashboard-{name}.png"
        print(path, draw(Prometheus(sys.argv[1]), name, path), "panels with an answer")
