"""Everything that a run leaves in its folder."""

from __future__ import annotations

from pathlib import Path

from assay_load.report import markdown
from assay_load.report.result import RunResult


def write_all(result: RunResult, folder: Path) -> Path:
    """result.json, result.md, report.html and the plots; the folder."""
    # The JSON first: whatever happens to the pictures, the measurement is kept.
    result.write(folder)
    (folder / "result.md").write_text(markdown.summary(result), encoding="utf-8")
    from assay_load.report import html

    html.write(result, folder)
    return folder
