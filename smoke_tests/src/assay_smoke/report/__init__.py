"""A run's report: on a terminal while it runs, and as JSON, JUnit XML and Markdown after it."""

from assay_smoke.report.files import write_json, write_junit, write_markdown
from assay_smoke.report.terminal import Terminal, table

__all__ = ["Terminal", "table", "write_json", "write_junit", "write_markdown"]
