"""One HTML file that needs nothing else, and the plots beside it as PNG."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import jinja2

from assay_load.measure.tally import METRICS
from assay_load.report import plots
from assay_load.report.result import RunResult


def write(result: RunResult, folder: Path) -> None:
    pictures = plots.draw(result)
    for name, png in pictures.items():
        (folder / f"{name}.png").write_bytes(png)
    (folder / "report.html").write_text(render(result, pictures), encoding="utf-8")


def render(result: RunResult, pictures: dict[str, bytes]) -> str:
    loader = jinja2.PackageLoader("assay_load", "report")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    images = {name: base64.b64encode(png).decode() for name, png in pictures.items()}
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(result.started))
    return environment.get_template("report.html.j2").render(
        result=result, images=images, when=when, metrics=METRICS
    )
