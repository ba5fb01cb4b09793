"""What a user of the official OpenAI client relies on, against the real server."""

from __future__ import annotations

import json
import math
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from .server import Server

CAPITAL = "What is the capital of France?"
QUESTIONS = [
    f"What is the capital of {country}?"
    for country in (
        "France", "Germany", "Italy", "Spain", "Portugal", "Austria", "Belgium", "Denmark",
        "Sweden", "Norway", "Finland", "Japan", "China", "India", "Canada", "Brazil",
    )
]  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def streamed(stream: Any) -> tuple[str, str, str | None]:
    """(content, reasoning, finish reason) of a stream, put together."""
    content, reasoning, finish = "", "", None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            finish = choice.finish_reason or finish
    return content, reasoning, finish


def test_the_capital_of_france(ask: Any) -> None:
    choice = ask(CAPITAL).choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert "<" not in choice.message.content  # no special token leaks into the text


def test_a_stream_says_the_same_as_a_whole_answer(ask: Any) -> None:
    whole = ask(CAPITAL).choices[0]
    content, _, finish = streamed(ask(CAPITAL, stream=True))
    assert (content, finish) == (whole.message.content, whole.finish_reason)


def test_thinking_gives_reasoning_and_an_answer(ask: Any) -> None:
    message = ask(CAPITAL, thinking=True, max_tokens=400).choices[0].message
    assert message.reasoning.strip()
    assert "Paris" in message.content
    assert "</think>" not in message.content + message.reasoning


def test_thinking_is_streamed_apart_from_the_answer(ask: Any) -> None:
    message = ask(CAPITAL, thinking=True, max_tokens=400).choices[0].message
    content, reasoning, _ = streamed(ask(CAPITAL, thinking=True, max_tokens=400, stream=True))
    assert (content, reasoning) == (message.content, message.reasoning)


def test_without_thinking_there_is_no_reasoning(ask: Any) -> None:
    message = ask(CAPITAL, thinking=False).choices[0].message
    assert not getattr(message, "reasoning", None)
    assert message.content.strip()


def test_a_second_turn_sees_the_first(client: OpenAI, ask: Any) -> None:
    first = ask("My name is Anna.").choices[0].message.content
    messages = [
        {"role": "user", "content": "My name is Anna."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "What is my name?"},
    ]
    assert "Anna" in ask("", messages=messages).choices[0].message.content


@pytest.mark.parametrize(
    "choice",
    ["auto", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["auto", "forced"],
)
def test_a_tool_is_called(ask: Any, choice: Any) -> None:
    message = (
        ask("What is the weather in Paris?", tools=[WEATHER], tool_choice=choice).choices[0].message
    )
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_a_tool_call_is_streamed_in_pieces_that_fit_together(ask: Any) -> None:
    name, arguments, finish = "", "", None
    for chunk in ask("What is the weather in Paris?", tools=[WEATHER], stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or []:
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    assert (name, json.loads(arguments), finish) == ("get_weather", {"city": "Paris"}, "tool_calls")


def test_a_tool_result_is_answered(ask: Any) -> None:
    question = {"role": "user", "content": "What is the weather in Paris?"}
    called = ask("", messages=[question], tools=[WEATHER]).choices[0].message
    (call,) = called.tool_calls
    turn = {"role": "assistant", "content": called.content or "", "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'}
    answer = ask("", messages=[question, turn, result], tools=[WEATHER]).choices[0].message
    assert "sunny" in answer.content.lower()


def test_a_json_schema_is_kept(ask: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
        "required": ["country", "capital"],
        "additionalProperties": False,
    }
    answer = ask(
        'Answer in JSON with the keys "country" and "capital": what is the capital of France?',
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "capital", "schema": schema},
        },
    ).choices[0]
    assert answer.finish_reason == "stop"
    value = json.loads(answer.message.content)
    jsonschema.validate(value, schema)
    assert value["capital"] == "Paris"


def test_log_probabilities_are_finite_and_sorted(ask: Any) -> None:
    choice = ask(CAPITAL, logprobs=True, top_logprobs=5).choices[0]
    assert choice.logprobs.content
    for token in choice.logprobs.content:
        top = [t.logprob for t in token.top_logprobs]
        assert len(top) == 5
        assert all(math.isfinite(p) and p <= 0 for p in [token.logprob, *top])
        assert top == sorted(top, reverse=True)
        assert sum(math.exp(p) for p in top) <= 1 + 1e-4
        assert token.logprob == top[0]  # greedy
    assert "".join(t.token for t in choice.logprobs.content).startswith(choice.message.content)


def test_a_stop_string_ends_the_answer_before_it(ask: Any) -> None:
    whole = ask(CAPITAL).choices[0].message.content
    assert "Paris" in whole
    choice = ask(CAPITAL, stop=["Paris"]).choices[0]
    assert choice.message.content == whole.split("Paris")[0]
    assert choice.finish_reason == "stop"


def test_usage_adds_up(ask: Any, server: Server, model: str) -> None:
    answer = ask(CAPITAL, max_tokens=3)
    usage = answer.usage
    assert usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    body = {"model": model, "messages": [{"role": "user", "content": CAPITAL}]}
    body["chat_template_kwargs"] = {"thinking": False}
    request = urllib.request.Request(
        f"{server.url}/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert json.load(reply)["count"] == usage.prompt_tokens
    *_, last = ask(CAPITAL, max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert last.usage.model_dump(exclude_none=True) == usage.model_dump(exclude_none=True)


def test_a_wrong_model_name_is_not_found(ask: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        ask(CAPITAL, model="no-such-model")


def test_an_over_long_prompt_is_refused_with_the_limit(ask: Any, client: OpenAI) -> None:
    limit = client.models.list().data[0].model_dump()["max_model_len"]
    with pytest.raises(openai.BadRequestError, match=str(limit)):
        ask("word " * (2 * limit))
    assert "Paris" in ask(CAPITAL).choices[0].message.content  # and the server goes on


def test_a_bad_parameter_is_refused(ask: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(CAPITAL, temperature=-1)


NEAR_TIE = 0.1
"""Nats. Batched and single requests sum in different orders: with bf16 logits of about 10 (a step
is 1/16), a token may be overtaken only by one that was this near."""


def test_sixteen_streams_at_once_say_what_each_says_alone(ask: Any) -> None:
    def tokens(question: str) -> list[Any]:
        out = []
        for chunk in ask(question, stream=True, logprobs=True, top_logprobs=2, max_tokens=48):
            for choice in chunk.choices:
                out += choice.logprobs.content if choice.logprobs else []
        return out

    alone = [tokens(q) for q in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(tokens, QUESTIONS))
    assert "Paris" in "".join(step.token for step in alone[0])
    for question, one, many in zip(QUESTIONS, alone, together, strict=True):
        assert one, question
        assert many, question
        differs = next(
            (i for i, (a, b) in enumerate(zip(one, many, strict=False)) if a.token != b.token), None
        )
        if differs is None:
            assert len(one) == len(many), question
            continue
        first, second = one[differs].top_logprobs
        assert many[differs].token == second.token, (question, differs)
        assert first.logprob - second.logprob < NEAR_TIE, (question, differs)


def test_the_server_shows_that_the_plugin_is_active(server: Server) -> None:
    metrics = server.get("/metrics")
    (info,) = [line for line in metrics.splitlines() if line.startswith("assay_info{")]
    assert 'mode="w4a16"' in info
    assert any(
        line.startswith("assay_layers{") and not line.endswith(" 0.0")
        for line in metrics.splitlines()
    )
