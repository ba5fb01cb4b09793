"""The published JSON schemas, made from the models; a test holds the files against them."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from assay_load.report.result import RunResult


def as_text(model: type[BaseModel], title: str) -> str:
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **model.model_json_schema(mode="serialization"),
        "title": title,
    }
    return json.dumps(schema, indent=1) + "\n"


def result_schema() -> str:
    return as_text(RunResult, "The result of one load test")
