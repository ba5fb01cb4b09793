"""Reasons, read out of vLLM's log."""

import re
from dataclasses import dataclass
from pathlib import Path

_PREFIX = re.compile(
    r"^(?:\((?P<who>[\w.-]+) pid=(?P<pid>\d+)\)\s?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?"
)
_EXCEPTION = re.compile(r"^(?:[\w]+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure)\b(?::|$)")
_USAGE = re.compile(r"^[\w ./-]*: error: ")
# Errors that only report another: the reason stands before them.
_ECHO = re.compile(
    r"[Ii]nitialization failed|See root cause above|EngineDeadError|EngineCore failed to start"
    r"|WorkerProc failed|Engine core proc .* died|leaked (?:semaphore|shared_memory)"
)
_PLUGIN_FAILED = "Failed to load plugin assay"


def _split(line: str) -> tuple[re.Match[str], str]:
    match = _PREFIX.match(line)
    assert match is not None
    return match, line[match.end() :].rstrip()


def read(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def last_error(lines: list[str]) -> str | None:
    """The line that tells why vLLM ended: the last error before the ones that only pass it on."""
    reason = None
    engine_died = False
    for line in lines:
        match, text = _split(line)
        if _ECHO.search(text):
            if reason is not None:
                return reason
            engine_died |= "EngineDeadError" in text
        elif _EXCEPTION.match(text) or _USAGE.match(text):
            reason = f"{match['who']}: {text}" if match["who"] else text
    if reason is None and engine_died:
        return "its engine (VLLM::EngineCore) died without a word: killed from outside?"
    return reason


@dataclass(frozen=True)
class PluginFailure:
    """A process whose import of the plugin failed, which vLLM only logs."""

    pid: int | None
    """None: the log line carried no process, as early lines of the API server do not."""
    reason: str


def plugin_failures(lines: list[str]) -> list[PluginFailure]:
    failures = []
    for index, line in enumerate(lines):
        match, text = _split(line)
        if not text.startswith(_PLUGIN_FAILED):
            continue
        pid = int(match["pid"]) if match["pid"] else None
        reason = "no exception in the log"
        for later in lines[index + 1 : index + 400]:
            other, content = _split(later)
            if (other["pid"] and int(other["pid"])) != pid:
                continue
            if _EXCEPTION.match(content):
                reason = content
            elif content and not content.startswith(("Traceback", " ", "^", "~")):
                break
        failures.append(PluginFailure(pid, reason))
    return failures


_STAGES = (
    ("Application startup complete", "answering its health check"),
    ("Starting vLLM server", "opening the port"),
    ("Warming up", "warming up"),
    ("GPU KV cache size", "setting up the KV cache"),
    ("Loading weights took", "preparing the weights"),
    ("Loading safetensors", "loading weights"),
    ("Starting to load model", "loading weights"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("non-default args", "reading the model's configuration"),
)


def stage(lines: list[str]) -> str:
    """What vLLM is doing, in a few words, as far as its log tells."""
    text = "\n".join(lines)
    return next((words for mark, words in _STAGES if mark in text), "starting vLLM")
