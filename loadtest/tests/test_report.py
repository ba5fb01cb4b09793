"""What a run leaves behind: JSON by its schema, pictures, one HTML file, Markdown; comparisons."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from assay_load import cli
from assay_load.errors import InputError
from assay_load.gate import cli as gate_cli
from assay_load.report.compare import row, table
from assay_load.report.result import RunResult, read

PACKAGE = Path(str(resources.files("assay_load")))


@pytest.fixture(scope="module")
def folder(start_tool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a small run in steps, so that every plot has something to show."""
    made = tmp_path_factory.mktemp("results")
    server = start_tool("paced", "--ttft", "0.02", "--rate", "400", "--slots", "3")
    (made / "stepped.yaml").write_text(
        "name: stepped\nabout: x\n"
        "arrival: {kind: steps, concurrency: [1, 2, 4], seconds: 1.5, min_gain: 0.0}\n"
        "classes:\n"
        "  - {name: a, input: {kind: constant, tokens: 10}, output: {kind: constant, tokens: 8}}\n"
        "  - {name: b, input: {kind: constant, tokens: 10}, output: {kind: constant, tokens: 16}}\n"
    )
    code = cli.main(
        ["run", str(made / "stepped.yaml"), "--url", server.url, "--out", str(made / "out"),
         "--gpus", "8", "--gpu-hour-price", "2.5"]
    )  # fmt: skip
    assert code == 0
    return made / "out"


def test_the_published_schemas_are_those_of_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    for main, file in (
        (cli.main, PACKAGE / "report" / "result.schema.json"),
        (gate_cli.main, PACKAGE / "gate" / "verdict.schema.json"),
    ):
        assert main(["schema"]) == 0
        assert capsys.readouterr().out == file.read_text()


def test_the_json_keeps_to_its_schema(folder: Path) -> None:
    schema = json.loads((PACKAGE / "report" / "result.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    data = json.loads((folder / "result.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(data)
    data["figures"]["requests"] = "many"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(data)


def test_plots_are_pictures_and_the_html_needs_nothing_else(folder: Path) -> None:
    names = {path.stem for path in folder.glob("*.png")}
    assert names == {"latency-against-load", "throughput-against-load", "ttft", "itl", "timeline"}
    for path in folder.glob("*.png"):
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 500
        assert height > 200
    html = (folder / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 5
    assert not re.search(r"(?:src|href)=\"(?!data:)", html)
    assert "<script" not in html


def test_costs_follow_from_time_and_price(folder: Path) -> None:
    result = read(folder / "result.json")
    assert result.cost is not None
    assert result.cost.gpu_minutes == pytest.approx(8 * result.figures.seconds / 60)
    dollars = 2.5 * result.cost.gpu_minutes / 60
    assert result.cost.per_million_output_tokens == pytest.approx(
        dollars / result.figures.completion_tokens * 1e6
    )


def test_text_from_a_server_cannot_break_out_of_the_html(folder: Path, tmp_path: Path) -> None:
    from assay_load.report import html

    data = json.loads((folder / "result.json").read_text())
    data["errors"] = {"http_500": 1}
    data["error_examples"] = {"http_500": "<script>alert(1)</script> | x"}
    text = html.render(RunResult.model_validate(data), {})
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def changed(folder: Path, place: Path, count: int, factor: Callable[[int], float]) -> Path:
    """Copies of the result, each with its throughput and latencies changed by a factor."""
    data = json.loads((folder / "result.json").read_text())
    for number in range(count):
        copy = json.loads(json.dumps(data))
        slow = factor(number)
        copy["figures"]["output_tokens_per_second"] /= slow
        for percentiles in copy["figures"]["metrics"].values():
            for key in ("p50", "p99"):
                percentiles[key] *= slow
        target = place / f"run-{number}" / "result.json"
        target.parent.mkdir(parents=True)
        target.write_text(json.dumps(copy))
    return place


NOISE = np.random.default_rng(7).normal(0, 0.01, 100)


@pytest.mark.parametrize(("slow", "code"), [(1.0, 0), (1.2, 1), (1.05, 2)])
def test_compare_tells_slower_from_same_from_unclear(
    folder: Path, tmp_path: Path, slow: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    a = changed(folder, tmp_path / "a", 7, lambda i: float(np.exp(NOISE[i])))
    b = changed(folder, tmp_path / "b", 7, lambda i: slow * float(np.exp(NOISE[i + 20])))
    found = cli.main(["compare", str(a), str(b), "--json", str(tmp_path / "c.json")])
    output = capsys.readouterr().out
    assert found == code, output
    rows = {r["metric"]: r for r in json.loads((tmp_path / "c.json").read_text())["rows"]}
    true = slow - 1
    assert rows["itl.p50"]["low"] <= true <= rows["itl.p50"]["high"]


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        a, b = (np.exp(rng.normal(5, 0.05, 7)).tolist() for _ in range(2))
        made = row("itl.p50", a, b, 0.05)
        hits += made.low <= 0 <= made.high
    assert hits / 200 == pytest.approx(0.95, abs=0.05)


def test_compare_refuses_what_cannot_be_compared(folder: Path, tmp_path: Path) -> None:
    a = changed(folder, tmp_path / "a", 2, lambda _: 1.0)
    assert cli.main(["compare", str(a), str(a)]) == 2
    result = read(folder / "result.json")
    other = result.model_copy(update={"corpus": "another"})
    with pytest.raises(InputError, match="different workloads"):
        table([result] * 3, [other] * 3, 0.05)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other"}', "\x00"])
def test_a_file_that_is_no_result_is_one_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(InputError, match=re.escape(str(path))):
        read(path)


@pytest.mark.parametrize(
    ("main", "arguments", "flag"),
    [
        (cli.main, ["run", "chat", "--url", "http://127.0.0.1:9", "--out", "/proc/x"], "--out"),
        (cli.main, ["run", "chat", "--url", "http://x:9", "--out", "{}", "--raw", "/proc/x"],
         "--raw"),
        (gate_cli.main, ["run", "--policy", "miniature", "--url", "http://127.0.0.1:9",
                         "--out", "/proc/x"], "--out"),
        (gate_cli.main, ["baseline", "--policy", "miniature", "--url", "http://127.0.0.1:9",
                         "--out", "{}", "--write", "/proc/x/y"], "--write"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], main: Any, arguments: list[str], flag: str
) -> None:
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert f"{flag} /proc" in error
    assert "\n" not in error.strip()
