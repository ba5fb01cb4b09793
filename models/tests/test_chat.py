"""Our encoder writes what vLLM's writes, and the tokenizer gives it back."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from miniature import battery, chat, generate
from miniature.data import load_tokenizer

CHECKPOINT = Path(battery.__file__).parent / "checkpoint"


def _prompts(count: int) -> list[chat.Chat]:
    rng = random.Random("encoder")
    makers = [m for m, _ in generate.SHORT_MIX] + [generate.tool_call] * 4
    return [rng.choice(makers)(rng).chat for _ in range(count)]


def test_equal_to_vllms_encoder() -> None:
    theirs = pytest.importorskip("vllm.tokenizers.deepseek_v4_encoding")
    for example in _prompts(400):
        for messages in (example.messages, example.messages[:-1]):
            if messages[-1]["role"] == "system":
                continue
            mine = chat.prompt_text(
                chat.Chat(messages, example.tools, example.thinking, example.effort)
            )
            given = [dict(m) for m in messages]
            if example.tools:
                if given[0]["role"] != "system":
                    given.insert(0, {"role": "system"})
                given[0]["tools"] = example.tools
            assert mine == theirs.encode_messages(
                given,
                thinking_mode="thinking" if example.thinking else "chat",
                reasoning_effort=example.effort,
            )


def test_segments_mark_exactly_the_models_own_words() -> None:
    example = chat.Chat(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    )
    assert chat.segments(example) == [
        (f"{chat.BOS}{chat.USER}Hi{chat.ASSISTANT}{chat.END_THINK}", False),
        (f"Hello!{chat.EOS}", True),
    ]


def test_special_tokens_are_single_and_survive_a_round_trip() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    for number, token in enumerate(chat.HIDDEN_TOKENS + chat.VISIBLE_TOKENS):
        assert tokenizer.token_to_id(token) == number
        assert tokenizer.encode(token, add_special_tokens=False).ids == [number]
    for example in _prompts(60):
        text = chat.prompt_text(example)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_think_and_tool_marks_stay_in_decoded_text() -> None:
    """vLLM's parsers look for them, so only begin, end and padding may be skipped."""
    tokenizer = load_tokenizer(CHECKPOINT)
    text = f"{chat.BOS}{chat.THINK}a{chat.END_THINK}<{chat.DSML}tool_calls>{chat.EOS}"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    left = tokenizer.decode(ids, skip_special_tokens=True)
    assert left == f"{chat.THINK}a{chat.END_THINK}<{chat.DSML}tool_calls>"


def test_a_digit_is_a_token() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    assert tokenizer.encode("4711", add_special_tokens=False).tokens == ["4", "7", "1", "1"]


def test_config_and_tokenizer_agree() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    tokenizer = load_tokenizer(CHECKPOINT)
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert tokenizer.token_to_id(chat.BOS) == config["bos_token_id"]
    assert tokenizer.token_to_id(chat.EOS) == config["eos_token_id"]
