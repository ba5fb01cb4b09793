"""Two ranks against one: every shard of every NVFP4 matrix, its scales and its partitions.

The single server is held against transformers in `test_prompts`; here the same prompts must give
the same continuation when codes, block scales, output groups and experts are cut in two.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai import OpenAI

from .server import Server


def needle(name: str, code: int, sentences: int) -> str:
    """A question whose answer stands before `sentences` others."""
    filler = "On Monday the market is closed. " * sentences
    return f"The code of {name} is {code}. {filler}What is the code of {name}?"


PROMPTS = {
    "short": "What is the capital of France?",
    "past the window": needle("Anna", 4711, 40),
    "past 4 x index_topk": needle("Max", 8152, 300),
}
TOKENS = 12
LOGPROB_TOLERANCE = 0.1
"""Nats. Partial sums of two ranks are added in bf16; a wrong shard moves this by whole nats."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with (
        Server(tmp_path_factory.mktemp("tp2"), "--tensor-parallel-size", "2") as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=300) as made,
    ):
        yield made


def answer(client: OpenAI, model: str, text: str) -> list[tuple[str, float]]:
    """(token, log-probability) of a greedy answer."""
    choice = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=TOKENS,
        logprobs=True,
        extra_body={"chat_template_kwargs": {"thinking": False}},
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    return [(step.token, step.logprob) for step in choice.logprobs.content]


@pytest.mark.serve
@pytest.mark.parametrize("kind", PROMPTS)
def test_two_ranks_answer_as_one(client: OpenAI, two_ranks: OpenAI, model: str, kind: str) -> None:
    alone = answer(client, model, PROMPTS[kind])
    together = answer(two_ranks, model, PROMPTS[kind])
    assert [token for token, _ in together] == [token for token, _ in alone]
    for (token, p), (_, q) in zip(alone, together, strict=True):
        assert math.isfinite(q), token
        assert abs(p - q) < LOGPROB_TOLERANCE, (token, p, q)
