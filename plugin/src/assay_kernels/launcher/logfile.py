"""vLLM's log: kept, passed on, and reasons read out of it."""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

Echo = Literal["text", "json"]
KEPT_BYTES = 8 * 2**20
"""Of a log that is also echoed: the file is there to read reasons from, not to keep."""

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


@contextmanager
def sink(path: Path, echo: Echo | None) -> Iterator[int]:
    """A descriptor for vLLM to write its log to. With `echo`, lines go to standard output too."""
    if echo is None:
        with path.open("w") as file:
            yield file.fileno()
        return
    source, descriptor = os.pipe()
    threading.Thread(target=_relay, args=(source, path, echo), daemon=True).start()
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _relay(source: int, path: Path, echo: Echo) -> None:
    file = path.open("w")
    with os.fdopen(source, errors="replace") as lines:
        for line in lines:
            try:
                if file.tell() > KEPT_BYTES:
                    file.close()
                    path.rename(path.with_suffix(".1"))
                    file = path.open("w")
                file.write(line)
                file.flush()
            except OSError:
                pass  # a full disk must not stop the log, nor vLLM, which waits for its reader
            emit(line.rstrip("\n"), echo)


def emit(line: str, echo: Echo, process: str = "APIServer", out: IO[str] | None = None) -> None:
    """One line of a log to standard output."""
    out = out or sys.__stdout__
    assert out is not None
    _write(out, as_json(line, process) if echo == "json" else line)


_one_line_at_a_time = threading.Lock()


def _write(out: IO[str], line: str) -> None:
    """Whole, whichever thread writes beside this one: the launcher and vLLM's log share it."""
    with _one_line_at_a_time:
        out.write(f"{line}\n")
        out.flush()


def as_json(line: str, process: str) -> str:
    """A line as one JSON object; `process` is who wrote it where the line does not say so."""
    match, text = _split(line)
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03}Z"
    record = {"time": stamp, "level": match["level"] or "INFO", "process": match["who"] or process}
    if match["pid"]:
        record["pid"] = match["pid"]
    return json.dumps(record | {"message": text}, ensure_ascii=False)


class JsonLines:
    """A text stream that makes each line that is printed to it one JSON object: the launcher's own
    words between vLLM's."""

    def __init__(self, out: IO[str], level: str = "INFO") -> None:
        self._out = out
        self._level = level
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, lines):
            record = json.loads(as_json(line, "launcher")) | {"level": self._level}
            _write(self._out, json.dumps(record, ensure_ascii=False))
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        return False


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
