"""What single checks decide, on transcripts made for them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay_smoke import suite
from assay_smoke.checks import REGISTRY, Outcome
from assay_smoke.checks.compare import first_divergence
from assay_smoke.checks.long import windows
from assay_smoke.checks.probabilities import kl
from assay_smoke.client import Answer, Client, Token, ToolCall
from assay_smoke.lab import Lab
from assay_smoke.reference import Position
from assay_smoke.scoring import is_right, last_number
from assay_smoke.suite import Question, Suite


@pytest.fixture(scope="module")
def miniature() -> Suite:
    return suite.load("miniature")


def judge(name: str, answers: list[Answer], miniature: Suite, **params: Any) -> Outcome:
    """A transcript check's outcome, with no server behind it."""
    lab = Lab(Client("http://127.0.0.1:9"), miniature, miniature.tier("default"), 1)
    lab.transcript = answers
    return asyncio.run(REGISTRY[name](REGISTRY[name].Params(**params)).run(lab))


def answer(content: str = "Paris is the capital.", **values: Any) -> Answer:
    base: dict[str, Any] = {"label": "known-answers x", "finish_reason": "stop", "asked_tokens": 60,
                            "chat": True, "prompt": "Which city?"}  # fmt: skip
    return Answer(**(base | {"content": content} | values))


def tokens(*pairs: tuple[str, float]) -> list[Token]:
    return [Token(t, -0.01, ((t, -0.01), ("other", -0.01 - gap))) for t, gap in pairs]


GOOD = [answer() for _ in range(100)]


@pytest.mark.parametrize(
    ("check", "bad", "params"),
    [
        ("empty-content", answer(""), {}),
        ("empty-content", answer("", reasoning="I think so."), {}),
        ("empty-content", answer(" \n"), {}),
        ("special-tokens", answer("Paris</think>"), {}),
        ("special-tokens", answer("Paris", reasoning="<｜User｜>"), {}),
        ("script-mix", answer("Paris is the 首都."), {}),
        ("script-mix", answer("Paris", reasoning="ж"), {}),
        ("script-mix", answer("Pa\ufffdris"), {}),
        ("well-formed", answer(problems=["no finish_reason"]), {}),
        ("well-formed", answer(completion_tokens=40, tokens=tokens(("a", 5))), {}),
        (
            "nan-logprobs",
            answer(asked_logprobs=True, tokens=tokens(("a", 5)), unreal=["token 0: null"]),
            {},
        ),
    ],
)  # fmt: skip
def test_one_bad_answer_is_enough(check: str, bad: Answer, params: Any, miniature: Suite) -> None:
    good = [answer(asked_logprobs=True, tokens=tokens(("a", 5))) for _ in range(100)]
    params = {"unacceptable": 0.2} | params
    assert judge(check, good, miniature, **params).verdict == "pass"
    assert judge(check, [*good, bad], miniature, **params).verdict == "fail"
    assert judge(check, good[:1], miniature, **params).verdict == "unsure"


def test_what_is_no_fault_of_form(miniature: Suite) -> None:
    fine = [
        answer("", tool_calls=[ToolCall("f", "{}")], finish_reason="tool_calls"),
        answer("Ω as you said", prompt="What is Ω?"),
        answer("The tag </think> ends it.", prompt="What does </think> do?"),
        answer("<｜User｜>", chat=False, label="boundary-lengths 3"),
        *GOOD,
    ]
    for check in ("empty-content", "special-tokens", "script-mix"):
        assert judge(check, fine, miniature, unacceptable=0.2).verdict == "pass", check


def test_answers_that_run_on_are_counted(miniature: Suite) -> None:
    long = [answer(finish_reason="length") for _ in range(10)]
    assert judge("finish-reasons", GOOD, miniature).verdict == "pass"
    outcome = judge("finish-reasons", [*GOOD, *long], miniature)
    assert outcome.verdict == "fail"
    assert "length 10" in outcome.reason


def test_a_loop_is_a_repetition_and_a_story_is_none(miniature: Suite) -> None:
    story = [answer(" ".join(f"word{i} and thing{i * 7 % 50}" for i in range(60)))] * 40
    assert judge("repetition", story, miniature).verdict == "pass"
    loop = answer("Once there was " + "a cat and a dog " * 40)
    assert judge("repetition", [*story, loop], miniature).verdict == "fail"


def test_a_choice_that_is_not_the_likeliest(miniature: Suite) -> None:
    def lab(*answers: Answer) -> Outcome:
        return judge("greedy-choice", list(answers), miniature, unacceptable=0.5)

    fine = answer(tokens=tokens(*[("a", 5)] * 20))
    lost = Token("b", -9.0, (("a", -0.1), ("c", -2.0)))
    assert lab(fine).verdict == "pass"
    assert lab(fine, answer(tokens=[lost])).verdict == "fail"
    assert lab(fine, answer(tokens=[lost], free=False)).verdict == "pass"
    ended = Token("and", -9.0, (("<｜end▁of▁sentence｜>", -0.1), ("and", -9.0)))
    assert lab(fine, answer(tokens=[ended], endless=True)).verdict == "pass"
    assert lab(fine, answer(tokens=[ended])).verdict == "fail"


def test_a_divergence_counts_by_the_surer_side() -> None:
    a = answer(tokens=tokens(("x", 5), ("y", 0.2), ("z", 5)))
    b = answer(tokens=tokens(("x", 5), ("w", 0.1), ("z", 5)))
    c = answer(tokens=tokens(("x", 5), ("w", 6.0), ("z", 5)))
    tie, fault = first_divergence(a, b), first_divergence(a, c)
    assert tie is not None
    assert fault is not None
    assert (tie.index, fault.index) == (1, 1)
    assert tie.gap < 1 < fault.gap
    assert first_divergence(a, a) is None
    short = answer(tokens=a.tokens[:2], finish_reason="stop")
    cut = answer(tokens=a.tokens[:2], finish_reason="length")
    assert first_divergence(a, short) is None, "both say that they ended by themselves"
    ended = first_divergence(answer(tokens=a.tokens, finish_reason="length"), short)
    assert ended is not None
    assert (ended.index, ended.other) == (2, "(the end)")
    assert first_divergence(a, cut) is not None


def test_windows_say_where_it_begins() -> None:
    long = answer(tokens=[Token(f" {i}", -0.5) for i in range(1000)])
    found = list(windows(long, 256))
    assert [(w.first, w.last) for w in found] == [(0, 255), (256, 511), (512, 767), (768, 999)]
    assert found[0].surprise == pytest.approx(0.5)


PROBABILITIES = st.lists(st.floats(0.01, 1), min_size=4, max_size=8)


@given(PROBABILITIES, PROBABILITIES, st.integers(1, 3))
def test_the_divergence_is_a_lower_bound_of_the_true_one(
    p: list[float], q: list[float], listed: int
) -> None:
    n = min(len(p), len(q))
    p, q = ([x / sum(v[:n]) for x in v[:n]] for v in (p, q))
    true = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    order = sorted(range(n), key=lambda i: -p[i])[:listed]
    position = Position(logprobs={i: min(0.0, math.log(p[i])) for i in order})
    found = kl(position, {i: math.log(q[i]) for i in range(n)})
    assert -1e-9 <= found <= true + 1e-6


def test_a_divergence_of_nan_is_infinite() -> None:
    assert kl(Position(logprobs={1: -0.1}), {1: math.nan}) == math.inf


def question(kind: str, expected: Any, **more: Any) -> Question:
    return Question(id="q", category="c", kind=kind, expected=expected,  # type: ignore[arg-type]
                    messages=({"role": "user", "content": "?"},), **more)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "expected", "said", "right"),
    [
        ("number", "75", "75.00", True), ("number", "75", "It is 1, then 75.", True),
        ("number", "1234.5", "1,234.50", True), ("number", "75", "75.5", False),
        ("number", "-3", "x = -3", True), ("number", "3", "x = -3", False),
        ("number", "7", "none", False),
        ("word", "Paris", "paris!", True), ("word", "Paris", "Parisian", False),
        ("prefix", "85 ", "85 is larger.", True), ("prefix", "85 ", "The 85", False),
        ("text", "a b", " A  b\n", True), ("text", "a b", "a b c", False),
        ("json", {"a": 1}, '{"a": 1.0}', True), ("json", {"a": 1}, "{", False),
        ("json", {"a": 1}, "[" * 10**5, False),
    ],
)  # fmt: skip
def test_scoring(kind: str, expected: Any, said: str, right: bool) -> None:
    assert is_right(question(kind, expected), answer(said)) is right


def test_tool_calls_are_compared_as_values() -> None:
    wanted = question("tool", [{"name": "f", "arguments": {"a": 1, "b": "x"}}])
    right = answer("", tool_calls=[ToolCall("f", '{"b": "x",\n"a": 1}')])
    assert is_right(wanted, right)
    for calls in (
        [],
        [ToolCall("g", '{"a": 1, "b": "x"}')],
        [ToolCall("f", "{")],
        right.tool_calls * 2,
    ):
        assert not is_right(wanted, answer("", tool_calls=calls))


@given(st.text())
def test_any_text_has_a_last_number_or_none(text: str) -> None:
    last_number(text)


class Told(Lab):
    """Answers every chat with the same answer."""

    said: Answer

    async def chat(self, messages: Any, **more: Any) -> Answer:
        return self.said


def long_outcome(said: Answer, miniature: Suite) -> Outcome:
    lab = Told(Client("http://127.0.0.1:9"), miniature, miniature.tier("default"), 1)
    lab.said = said
    check = REGISTRY["long-generation"]
    return asyncio.run(check(check.Params(answers=1, tokens=512, window=128)).run(lab))


def story(*odd: tuple[int, str]) -> list[Token]:
    texts = [f" word{i}" for i in range(512)]
    for index, text in odd:
        texts[index] = text
    return [Token(text, -0.1) for text in texts]


def test_corruption_is_located_by_its_window(miniature: Suite) -> None:
    good = answer("".join(t.text for t in story()), tokens=story(), completion_tokens=512)
    assert long_outcome(good, miniature).verdict == "pass"
    late = story(*[(i, " ж") for i in range(300, 380)])
    bad = answer("".join(t.text for t in late), tokens=late)
    outcome = long_outcome(bad, miniature)
    assert outcome.verdict == "fail"
    assert "tokens 256-383" in outcome.reason


def test_half_a_character_in_a_token_is_no_corruption(miniature: Suite) -> None:
    """Tokenizers cut characters; the text that a client sees has them whole."""
    halves = story(*[(i, "\ufffd") for i in range(100, 110)])
    whole = "".join(t.text for t in story()) + " 😀"
    assert long_outcome(answer(whole, tokens=halves), miniature).verdict == "pass"
    broken = answer("".join(t.text for t in halves), tokens=halves)
    assert long_outcome(broken, miniature).verdict == "fail"


def test_tokens_that_nobody_saw_are_not_looked_at(miniature: Suite) -> None:
    claimed = answer("A story.", tokens=[], completion_tokens=512)
    assert long_outcome(claimed, miniature).verdict == "unsure"
