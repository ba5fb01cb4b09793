"""One real server for the whole session, and the official client on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from .server import CHECKPOINT, Server, served_name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.serve)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (CHECKPOINT / "config.json").is_file():
        pytest.fail(f"no checkpoint at {CHECKPOINT}")
    with Server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[OpenAI]:
    # No retries: an error that goes away on the second try is still an error.
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="session")
def model() -> str:
    return served_name()


@pytest.fixture(scope="session")
def ask(client: OpenAI, model: str) -> Any:
    """`ask("text", thinking=False, **parameters)` -> a chat completion, greedy."""

    def ask(text: str, *, thinking: bool = False, **parameters: Any) -> Any:
        return client.chat.completions.create(
            **{
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": 128,
                "extra_body": {"chat_template_kwargs": {"thinking": thinking}},
            }
            | parameters
        )

    return ask
