"""GSM8K from a local file: our score, and lm-eval's on the same file."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Smoke = Callable[..., subprocess.CompletedProcess[str]]
LM_EVAL = os.environ.get("LM_EVAL", "")

# The stock task `gsm8k` of lm-eval, on local files: chats, first examples, flexible-extract.
TASK = """
task: gsm8k_local
dataset_path: json
dataset_kwargs: {{data_files: {{train: {train}, test: {test}}}}}
output_type: generate_until
training_split: train
fewshot_split: train
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
fewshot_config: {{sampler: first_n}}
num_fewshot: 8
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]
generation_kwargs:
  until: ["Question", "Assistant:", "<|separator|>"]
  do_sample: false
  temperature: 0.0
  max_gen_toks: 256
filter_list:
  - name: flexible-extract
    filter:
      - function: regex
        group_select: -1
        regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"
      - function: take_first
"""


def problems(n: int) -> list[dict[str, str]]:
    """Sums; the fault server adds all numbers that it reads, modulo 97, so some come out wrong."""
    rng = random.Random(3)
    found = []
    for _ in range(n):
        a, b = rng.randint(2, 60), rng.randint(2, 60)
        text = f"Tom has {a} plums and buys {b} more. How many has he?"
        found.append({"question": text, "answer": f"{a} + {b} = {a + b}\n#### {a + b}"})
    return found


def written(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def score(smoke: Smoke, url: str, out: Path, *more: Any) -> tuple[int, dict[str, Any]]:
    done = smoke("run", "--url", url, "--json", out, *more)
    report = json.loads(out.read_text()) if out.exists() else {"stderr": done.stderr}
    return done.returncode, report


def asked(prompt: str) -> int:
    """Number of the question 'Q17?', the last of a prompt."""
    return int(re.findall(r"Q(\d+)\?", prompt)[-1])


def test_a_file_is_scored_and_invalid_answers_are_counted_apart(
    broken: Any, smoke: Smoke, tmp_path: Path
) -> None:
    server = broken()
    answers = ["I do not know.", "#### 1", "The answer is 1,000.00", "no", *["7"] * 56]
    server.server.model.plan = lambda prompt: _plan(answers[asked(prompt)])
    wanted = [{"question": f"Q{i}?", "answer": f"#### {n}"} for i, n in
              enumerate(["5", "2", "1000", "3", *["7"] * 56])]  # fmt: skip
    data = written(tmp_path / "asked.jsonl", wanted)
    shots = written(tmp_path / "shots.jsonl", problems(8))
    code, report = score(
        smoke, server.url, tmp_path / "r.json", "--eval", f"gsm8k={data}", "--shots", shots,
        "--at-least", 0.8,
    )  # fmt: skip
    (check,) = report["checks"]
    assert check["figures"]["accuracy"] == pytest.approx(57 / 60)
    assert check["figures"]["invalid_rate"] == pytest.approx(2 / 60, abs=1e-6)
    assert (code, report["verdict"]) == (0, "pass")


def _plan(text: str) -> Any:
    from assay_smoke.faults.model import Plan
    from assay_smoke.faults.tokens import encode_text

    return Plan(content=encode_text(text))


def test_a_poor_score_fails_and_a_near_one_is_undecided(
    broken: Any, smoke: Smoke, tmp_path: Path
) -> None:
    data = written(tmp_path / "gsm8k.jsonl", problems(40))
    url = broken().url
    code, report = score(smoke, url, tmp_path / "r.json", "--eval", f"gsm8k={data}")
    assert (code, report["verdict"]) == (1, "fail")
    accuracy = report["checks"][0]["figures"]["accuracy"]
    near = str(min(0.99, max(0.01, accuracy)))
    code, report = score(
        smoke, url, tmp_path / "r.json", "--eval", f"gsm8k={data}", "--at-least", near
    )
    assert (code, report["checks"][0]["verdict"]) == (2, "unsure")


@pytest.mark.parametrize(
    ("arguments", "records", "words"),
    [
        (["--eval", "mmlu={data}"], problems(9), "must be gsm8k=FILE"),
        (["--eval", "gsm8k=/nowhere/x"], problems(9), "/nowhere/x"),
        (["--eval", "gsm8k={data}"], problems(8), "nothing is left to ask"),
        (["--eval", "gsm8k={data}"], problems(3), "8 examples are needed"),
        (["--eval", "gsm8k={data}"], [*problems(8), {"question": "x", "answer": "5"}], "#### NUM"),
        (["--eval", "gsm8k={data}", "--at-least", "2"], problems(9), "--at-least"),
        (["--eval", "gsm8k={data}", "--eval-limit", "0"], problems(9), "--eval-limit"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_scored_is_one_line(
    smoke: Smoke, tmp_path: Path, arguments: list[str], records: list[Any], words: str
) -> None:
    data = written(tmp_path / "data.jsonl", records)
    done = smoke("run", *(a.format(data=data) for a in arguments))
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not LM_EVAL, reason="LM_EVAL names no lm-eval; make smoke-lm-eval does")
def test_lm_eval_gives_the_same_score(broken: Any, smoke: Smoke, tmp_path: Path) -> None:
    """A server that is wrong in some answers only, so that the score says something."""
    train = written(tmp_path / "train.jsonl", problems(8))
    asked = [p | {"question": p["question"] + f" ({i})"} for i, p in enumerate(problems(60))]
    test = written(tmp_path / "test.jsonl", asked)
    sums = {f"{p['question']}": p["answer"].rpartition(" ")[2] for p in asked}
    server = broken()

    def plan(prompt: str) -> Any:
        question = prompt.rpartition("Question: ")[2].partition("\n")[0]
        index = int(question.rpartition("(")[2].rstrip(")"))
        value = sums[question]
        said = [f"It is {value}.", f"#### {value}", "Many.", f"{value} - or {int(value) + 1}"]
        return _plan(said[min(3, index % 7)] if index % 7 < 4 else f"The answer is {value}")

    server.server.model.plan = plan
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "gsm8k_local.yaml").write_text(TASK.format(train=train, test=test))
    out = tmp_path / "out"
    subprocess.run(
        [LM_EVAL, "--model", "local-chat-completions", "--tasks", "gsm8k_local",
         "--include_path", str(tasks), "--apply_chat_template", "--output_path", str(out),
         "--model_args", f"model=assay-faulty,base_url={server.url}/v1/chat/completions,"
         "num_concurrent=8,max_retries=1"],
        check=True, capture_output=True, text=True, timeout=280,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    (result,) = out.rglob("results_*.json")
    theirs = json.loads(result.read_text())["results"]["gsm8k_local"]
    _, report = score(
        smoke, server.url, tmp_path / "r.json", "--eval", f"gsm8k={test}", "--shots", train
    )
    ours = report["checks"][0]["figures"]["accuracy"]
    assert 0.5 < ours < 0.9
    assert theirs["exact_match,flexible-extract"] == pytest.approx(ours, abs=1e-6)
