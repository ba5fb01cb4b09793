"""Suites are read strictly: every mistake is one line that names the file and the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from assay_smoke import suite
from assay_smoke.checks import REGISTRY
from assay_smoke.errors import SuiteError

GOOD: dict[str, Any] = {
    "name": "tiny",
    "about": "for tests",
    "scripts": ["Latin"],
    "margin": 1,
    "questions": "q.jsonl",
    "passages": "p.jsonl",
    "needle": {"fact": "{name} has {code}.", "question": "What has {name}?", "names": ["A"],
               "filler": ["B."]},
    "long": {"prompts": ["Tell."]},
    "tiers": {"ready": {"tokens": 10, "deadline": 5, "checks": {"empty-content": None}}},
}  # fmt: skip
QUESTION = {"id": "a", "category": "c", "kind": "word", "expected": "x",
            "messages": [{"role": "user", "content": "?"}]}  # fmt: skip


def written(folder: Path, document: Any, questions: Any = (QUESTION,)) -> str:
    path = folder / "tiny.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    (folder / "q.jsonl").write_text(
        "\n".join(q if isinstance(q, str) else json.dumps(q) for q in questions)
    )
    (folder / "p.jsonl").write_text('{"name": "one", "text": "Good."}\n')
    return str(path)


def changed(**values: Any) -> dict[str, Any]:
    return GOOD | values


@pytest.mark.parametrize("name", suite.shipped())
def test_shipped_suites_are_whole(name: str) -> None:
    found = suite.load(name)
    assert set(found.tiers) == set(suite.TIERS)
    for tier in ("default", "full"):
        missing = set(REGISTRY) - set(found.tiers[tier].checks)  # type: ignore[index]
        assert not missing, f"{tier} leaves out {missing}"
    ids = [q.id for q in found.questions]
    for tier in found.tiers.values():
        for parameters in tier.checks.values():
            assert set((parameters or {}).get("first", ())) <= set(ids)


def test_a_suite_is_read(tmp_path: Path) -> None:
    found = suite.load(written(tmp_path, GOOD))
    assert (found.name, found.margin, len(found.questions)) == ("tiny", 1.0, 1)


def test_a_tier_extends_another_parameter_by_parameter(tmp_path: Path) -> None:
    tiers = {
        "ready": {"tokens": 10, "deadline": 5, "checks": {
            "known-answers": {"sample": 5, "unacceptable": 0.5}, "well-formed": None}},
        "full": {"extends": "ready", "tokens": 99, "without": ["well-formed"],
                 "checks": {"known-answers": {"sample": 50}}},
    }  # fmt: skip
    full = suite.load(written(tmp_path, changed(tiers=tiers))).tier("full")
    assert (full.tokens, full.deadline) == (99, 5)
    assert full.checks == {"known-answers": {"sample": 50, "unacceptable": 0.5}}


TIER = GOOD["tiers"]["ready"]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (changed(colour="red"), "colour: unknown key"),
        (changed(margin=-1), "margin: Input should be greater than 0"),
        (changed(margin=float("nan")), "margin"),
        ({k: v for k, v in GOOD.items() if k != "needle"}, "needle: Field required"),
        (changed(needle=GOOD["needle"] | {"fact": "no places"}), "must hold {name}"),
        (changed(tiers={"quick": TIER}), "tiers.quick"),
        (
            changed(tiers={"ready": TIER | {"checks": {"empty": None}}}),
            "checks.empty: no such check",
        ),
        (
            changed(tiers={"ready": TIER | {"checks": {"empty-content": {"max": 1}}}}),
            "max: unknown key",
        ),
        (
            changed(tiers={"ready": TIER | {"checks": {"empty-content": {"tolerated": 0.5}}}}),
            "below",
        ),
        (changed(tiers={"ready": TIER | {"checks": {}}}), "no checks"),
        (changed(tiers={"ready": TIER | {"tokens": 0}}), "tokens"),
        (changed(tiers={"ready": {"extends": "full"}}), "extends full, which is not there"),
        (changed(tiers={"ready": {"extends": "ready", "checks": {}}}), "extends itself"),
        (
            changed(tiers={"ready": TIER, "full": {"extends": "ready", "without": ["x"]}}),
            "x is not in",
        ),
        (changed(questions="gone.jsonl"), "gone.jsonl: [Errno 2]"),
        (changed(questions="."), "Is a directory"),
        ("name: a\nname: b\n", "the key 'name' stands twice"),
        ("name: [", "is not YAML"),
        ("- 1", "should be a valid dictionary"),
        ("", "should be a valid dictionary"),
        ("a: !!python/object/apply:os.system [true]", "is not YAML"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, document: Any, words: str) -> None:
    with pytest.raises(SuiteError) as caught:
        suite.load(written(tmp_path, document))
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        (["{"], "q.jsonl:1: not JSON"),
        ([QUESTION, QUESTION], "'a' stands twice"),
        ([QUESTION | {"kind": "essay"}], "q.jsonl:1: kind"),
        ([QUESTION | {"answer": 1}], "answer: unknown key"),
        ([QUESTION | {"messages": []}], "messages"),
        ([], "is empty"),
    ],
)
def test_a_mistake_in_a_question_is_one_line(tmp_path: Path, questions: Any, words: str) -> None:
    with pytest.raises(SuiteError, match=r"q\.jsonl") as caught:
        suite.load(written(tmp_path, GOOD, questions))
    assert words in str(caught.value)


def test_an_unknown_suite_names_those_there_are() -> None:
    with pytest.raises(SuiteError, match="deepseek-v4, miniature"):
        suite.load("miniatur")


def test_every_check_gives_its_reason() -> None:
    for check in REGISTRY.values():
        assert len(check.why()) > 100, check.name
