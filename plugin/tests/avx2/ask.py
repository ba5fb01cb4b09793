"""Ask the miniature a few prompts in this process and write its answers.

usage: ask.py MODEL_FOLDER OUT.json [--expect CPU_CAPABILITY]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


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

    register()
    print(standins.install().line)
    llm = LLM(
        model=arguments.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_dtype="fp8",
        block_size=256,
        max_model_len=1024,
        max_num_seqs=2,
    )
    # Short, past the sliding window, and 9 generated tokens: two windows of the ratio-4 compressor.
    prompts = [[5, 7, 11, 13, 17, 19, 23], [i % 4000 + 2 for i in range(150)]]
    greedy = SamplingParams(
        max_tokens=9, temperature=0, logprobs=1, detokenize=False, ignore_eos=True
    )
    answers = []
    for prompt in prompts:
        completion = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[
            0
        ].outputs[0]
        assert completion.logprobs is not None
        tokens = list(completion.token_ids)
        logprobs = [
            step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)
        ]
        answers.append({"tokens": tokens, "logprobs": logprobs})
    # A temperature takes another path through the sampler than greedy decoding does.
    sampled = SamplingParams(max_tokens=2, temperature=1.0, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompts[0]}], sampled, use_tqdm=False)
    arguments.out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
