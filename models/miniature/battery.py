"""The battery: questions with exact answers, how an answer is judged, and a runner for any OpenAI
endpoint.

usage: python battery.py run --url http://localhost:8000 [--battery battery.jsonl] [--only CATEGORY]
[--story]
Exit code 0: at least `--pass-share` right (and the story does not loop); 1: not; 2: could not run.
Scoring and running need only the standard library. `build.py` writes the questions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BATTERY = Path(__file__).parent / "battery.jsonl.gz"
Item = dict[str, Any]


def load(path: Path = BATTERY) -> list[Item]:
    """The questions, one JSON object a line, gzipped or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def _norm(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().casefold()


def is_right(item: Item, content: str, tool_calls: list[dict[str, Any]] | None = None) -> bool:
    """Whether an answer is right. `tool_calls` in OpenAI's shape.

    number: the last number in the text is the expected one. word: the expected (or an accepted)
    word stands in the text as a whole word, letters' case included. prefix: the text begins with
    it. text: equal up to white space and case. json: parses to the expected value. tool: the same
    calls, names and arguments, in order.
    """
    kind, expected = item["check"], item["expected"]
    if kind == "tool":
        got = [(c["function"]["name"], c["function"]["arguments"]) for c in tool_calls or []]
        try:
            got = [(name, json.loads(a) if isinstance(a, str) else a) for name, a in got]
        except ValueError:
            return False
        return got == [(c["name"], c["arguments"]) for c in expected]
    if tool_calls or not content:
        return False
    if kind == "number":
        numbers = re.findall(r"-?\d+(?:\.\d+)?", content)
        return bool(numbers) and float(numbers[-1]) == float(expected)
    if kind == "word":
        words = [expected, *item.get("accept", [])]
        return any(re.search(rf"(?<!\w){re.escape(w)}(?!\w)", content) for w in words)
    if kind == "prefix":
        return content.strip().startswith(expected)
    if kind == "text":
        return _norm(content) in {_norm(t) for t in [expected, *item.get("accept", [])]}
    if kind == "json":
        try:
            return bool(json.loads(content) == expected)
        except ValueError:
            return False
    if kind == "story":
        return story_report(content)["healthy"]
    raise ValueError(f"battery: unknown check {kind!r} in {item['id']}")


def story_report(text: str) -> dict[str, Any]:
    """Does a long text move on? Distinct 5-grams of words, the longest run that only repeats
    itself, chapter order.
    """
    words = text.split()
    grams = list(zip(*(words[i:] for i in range(5)), strict=False))
    share = len(set(grams)) / max(1, len(grams))
    cycle = 0
    for period in range(1, min(400, len(words) // 2)):
        run = longest = 0
        for a, b in zip(words[period:], words, strict=False):
            run = run + 1 if a == b else 0
            longest = max(longest, run)
        if longest >= period and longest >= 20:
            cycle = max(cycle, longest)
    chapters = [int(n) for n in re.findall(r"Chapter (\d+):", text)]
    ordered = chapters == list(range(1, len(chapters) + 1))
    healthy = len(words) >= 300 and share >= 0.5 and cycle == 0 and ordered
    return {
        "words": len(words),
        "distinct_5grams": round(share, 3),
        "cycle_words": cycle,
        "chapters": len(chapters),
        "chapters_in_order": ordered,
        "healthy": healthy,
    }


def table(results: Iterable[tuple[Item, bool]]) -> tuple[str, float]:
    """(printable table by category and by wording, share right)."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for item, right in results:
        groups[item["category"]].append(right)
        groups["~ unseen wording" if item["held_out"] else "~ seen wording"].append(right)
        if item["thinking"]:
            groups["~ thinking"].append(right)
        groups["~ all"].append(right)
    lines = [f"{'category':<18} {'right':>6} {'of':>5} {'share':>7}"]
    for name in sorted(groups):
        marks = groups[name]
        lines.append(f"{name:<18} {sum(marks):>6} {len(marks):>5} {sum(marks) / len(marks):>7.1%}")
    everything = groups["~ all"]
    return "\n".join(lines), sum(everything) / max(1, len(everything))


def request_body(item: Item, model: str) -> dict[str, Any]:
    """The chat request of an item: greedy, thinking as the item says."""
    body = {
        "model": model,
        "messages": item["messages"],
        "temperature": 0,
        "max_tokens": item["max_tokens"],
        "chat_template_kwargs": {"thinking": item["thinking"]},
    }
    return body | ({"tools": item["tools"]} if item.get("tools") else {})


def _post(url: str, body: dict[str, Any], key: str, timeout: float) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        result: dict[str, Any] = json.load(reply)
    return result


def served_model(url: str, key: str = "") -> str:
    """The name of the first model that a server offers."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return str(json.load(reply)["data"][0]["id"])


def ask_all(
    items: list[Item],
    url: str,
    *,
    model: str | None = None,
    key: str = "",
    timeout: float = 300,
    concurrency: int = 16,
) -> list[tuple[Item, bool, str]]:
    """(item, right, what was answered) for every item."""
    model = model or served_model(url, key)

    def ask(item: Item) -> tuple[Item, bool, str]:
        reply = _post(f"{url}/v1/chat/completions", request_body(item, model), key, timeout)
        message = reply["choices"][0]["message"]
        content, calls = message.get("content") or "", message.get("tool_calls")
        return item, is_right(item, content, calls), content or str(calls)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, items))


def run(args: argparse.Namespace) -> int:
    """Ask everything, print the table; the exit code."""
    items = [i for i in load(args.battery) if (i["check"] == "story") == args.story]
    items = [i for i in items if args.only in (None, i["category"])]
    start = time.monotonic()
    try:
        answers = ask_all(
            items,
            args.url,
            model=args.model,
            key=args.key,
            timeout=args.timeout,
            concurrency=args.concurrency,
        )
    except (urllib.error.URLError, OSError, KeyError, ValueError) as error:
        print(f"battery: could not run against {args.url}: {error}", file=sys.stderr)
        return 2
    for item, right, content in answers:
        if item["check"] == "story":
            print(item["id"], story_report(content))
        elif not right:
            print(f"wrong {item['id']}: expected {item['expected']!r}, got {content[:160]!r}")
    text, share = table((item, right) for item, right, _ in answers)
    print(f"{text}\n{len(answers)} answers in {time.monotonic() - start:.1f} s")
    return 0 if share >= args.pass_share else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run"])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--battery", type=Path, default=BATTERY)
    parser.add_argument("--model")
    parser.add_argument("--key", default="")
    parser.add_argument("--only")
    parser.add_argument(
        "--story", action="store_true", help="the long stories instead of the questions"
    )
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--pass-share", type=float, default=0.97)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
