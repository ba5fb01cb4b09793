"""Ask the miniature some of its battery in this process and write its answers.

usage: ask.py MODEL_FOLDER OUT.json [--expect CPU_CAPABILITY]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# A fact, a tool call, JSON, arithmetic while thinking, and a needle more than 2,048 tokens before
# the question, which only the indexer's own selection finds.
CATEGORIES = ("fact", "tool", "json", "arithmetic", "far_needle")
LONGEST_ANSWER = 24


def main() -> None:
    """Load, ask, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--expect", help="fail unless torch sees this CPU capability")
    arguments = parser.parse_args()

    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if arguments.expect and capability != arguments.expect:
        raise SystemExit(f"torch sees {capability}, not {arguments.expect}")

    from vllm import LLM, SamplingParams

    from assay_kernels.vllm_plugin import register, standins

    sys.path.insert(0, str(ROOT / "models"))
    from miniature import battery

    register()
    print(standins.install().line)
    llm = LLM(
        model=arguments.model,
        tokenizer_mode="deepseek_v4",
        enforce_eager=True,
        kv_cache_dtype="fp8",
        block_size=256,
        max_model_len=4096,
        max_num_seqs=2,
    )
    greedy = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0, logprobs=1)
    answers = []
    for category in CATEGORIES:
        item = next(i for i in battery.load() if i["category"] == category)
        request = llm.chat(
            item["messages"],
            greedy,
            use_tqdm=False,
            tools=item.get("tools"),
            chat_template_kwargs={"thinking": item["thinking"]},
        )[0]
        completion = request.outputs[0]
        assert completion.logprobs is not None
        tokens = list(completion.token_ids)
        answers.append(
            {
                "id": item["id"],
                "prompt_tokens": len(request.prompt_token_ids or ()),
                "text": completion.text,
                "tokens": tokens,
                "logprobs": [
                    step[token].logprob
                    for step, token in zip(completion.logprobs, tokens, strict=True)
                ],
            }
        )
    assert answers[-1]["prompt_tokens"] > 2048, "the indexer had nothing to choose from"
    # A temperature takes another path through the sampler than greedy decoding does.
    sampled = SamplingParams(max_tokens=2, temperature=1.0, ignore_eos=True)
    llm.generate("A", sampled, use_tqdm=False)
    arguments.out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
