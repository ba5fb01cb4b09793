"""Before a run: which model is served, and how much text makes a token there."""

from __future__ import annotations

import msgspec

from assay_load.errors import TargetError
from assay_load.stream.client import COMPLETIONS, Client, Target
from assay_load.stream.errors import StreamError
from assay_load.workload.corpus import Corpus
from assay_load.workload.plan import Calibration

SHORT, LONG = 400, 2400
"""Characters of the two prompts whose token counts are compared: what the chat encoding adds to
both falls out of the difference."""
PROBES = 3


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Completion(msgspec.Struct):
    usage: _Usage


def models(client: Client) -> list[str]:
    """The names at `/v1/models`; raises TargetError."""
    try:
        answer = msgspec.json.decode(client.get("/v1/models", 30.0), type=_Models)
    except (StreamError, msgspec.MsgspecError) as error:
        raise TargetError(f"/v1/models: {error}") from error
    return [model.id for model in answer.data]


def choose_model(client: Client, wanted: str | None) -> str:
    """The model to ask for; raises TargetError if the server does not serve it."""
    served = models(client)
    if wanted is None:
        if not served:
            raise TargetError("/v1/models: no model is served")
        return served[0]
    if wanted not in served:
        raise TargetError(f"the server serves {', '.join(served) or 'no model'}, not {wanted}")
    return wanted


def calibrate(client: Client, target: Target, corpus: Corpus) -> Calibration:
    """Characters a token of the corpus on this server, from the server's own counts; raises
    TargetError."""
    characters = tokens = 0
    for probe in range(PROBES):
        start = probe * len(corpus.text) // PROBES
        short, long = corpus.cut(start, SHORT), corpus.cut(start, LONG)
        characters += len(long) - len(short)
        tokens += _prompt_tokens(client, target, long) - _prompt_tokens(client, target, short)
    if tokens <= 0:
        raise TargetError("the server counts no more tokens in a longer prompt")
    return Calibration(characters / tokens)


def _prompt_tokens(client: Client, target: Target, text: str) -> int:
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0.0,
    }
    try:
        answer = client.post(COMPLETIONS, msgspec.json.encode(body), 600.0)
        return msgspec.json.decode(answer, type=_Completion).usage.prompt_tokens
    except (StreamError, msgspec.MsgspecError) as error:
        raise TargetError(f"{COMPLETIONS}: {error}") from error
