"""Compare two files of answers: exit 0 if they agree, else 1.

usage: compare.py HOST.json AVX2.json

Sums run in another order under AVX2 and bf16 activations differ by single steps; the trained
miniature is sure of its answers, so the same tokens must come out, at nearly the same probability.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LOGPROB = 0.1  # seen: 0.03


def main(host_file: str, avx2_file: str) -> int:
    """Print one line per question."""
    failed = False
    for host, avx2 in zip(
        json.loads(Path(host_file).read_text()),
        json.loads(Path(avx2_file).read_text()),
        strict=True,
    ):
        same = host["tokens"] == avx2["tokens"]
        worst = max(abs(x - y) for x, y in zip(host["logprobs"], avx2["logprobs"], strict=False))
        bad = not same or worst > LOGPROB
        failed |= bad
        print(
            f"avx2: {host['id']}, {host['prompt_tokens']} tokens of prompt: {avx2['text']!r}; "
            f"{'the same' if same else 'on the host ' + repr(host['text'])}, "
            f"log-probability within {worst:.3f}{' FAILED' if bad else ''}"
        )
    print("avx2: FAILED" if failed else "avx2: passed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
