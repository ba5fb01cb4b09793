"""How far vLLM with the plugin is from transformers in fp32 on the dequantised weights, and whether
that is as near as the unquantised model gets through the same vLLM.

Every dialect, and the unquantised control, is scored teacher-forced on the same texts, once as
prompts (prefill) and once, for the last tokens of some texts, one token at a time (decode: the
sampler is made to emit the text). At every position the whole next-token distribution of vLLM is
held against that of the reference:

    KL(reference || vllm), in nats, and whether both have the same most likely token.

vLLM's distance is not zero even for bf16 weights: activations are bf16 and the KV cache is fp8. So
the bound is set by the control, which is the bf16 checkpoint derived from the same weights, against
transformers in fp32 on *those* weights: mean KL at most 1.2 times the control's, top-1 agreement at
most half a point below it.

Exit code: 0 every dialect is within bounds, 1 one is not, 2 it could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from offline import CHECKPOINT, PROFILE, REPO, start_engine

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

CONTROL = "bf16"
DIALECTS = ("B", "A", "C")
MODES = ("w4a16", "w4a4", "reference")
MAX_MEAN_KL_RATIO = 1.2
MAX_SOUND_KL = 0.002
"""Nats. The control has 0.00005 on the trained miniature, the mildest served fault 0.005."""
MIN_SOUND_TOP1 = 0.90
"""The control has 0.947 on these texts, which are full of near-ties."""
MAX_TOP1_LOSS = 0.005
MIN_POSITIONS = 2000
TRIMMED = 0.001
"""Where two experts' scores are nearly equal, rounding decides which one is taken, and the position
moves by up to a nat, in the control as well. A few such positions can make up most of a mean: the
trimmed mean tells them from a kernel that is wrong everywhere."""
LONG_PROMPT = 3000
"""Tokens: past 4 * index_topk (2,048), so that the indexer has to choose."""
MAX_TOKENS = 4000
"""Texts end here: within the context of the launch profile."""
DECODE_TOKENS = 24
DECODE_EVERY = 4
"""Each fourth text, and the long one, has its last DECODE_TOKENS decoded as well."""
WORKER_TIMEOUT_S = 900.0


class CannotMeasureError(Exception):
    """Something that the measurement needs is missing or broken; exit code 2."""


@dataclass(frozen=True)
class Text:
    """A text to score, as token ids."""

    kind: str
    ids: list[int]
    decode: int
    """How many of its last tokens are also decoded one at a time."""


@dataclass(frozen=True)
class Score:
    """Agreement of one served checkpoint with its reference."""

    dialect: str
    positions: int
    mean_kl: float
    trimmed_kl: float
    """The mean without the TRIMMED share of largest values."""
    p99_kl: float
    max_kl: float
    top1: float
    decode_positions: int
    decode_mean_kl: float
    seconds: float = 0.0

    def sound(self) -> bool:
        """Near enough to the reference by itself. The control runs the plugin's operators too, so
        a fault of theirs would cancel in the ratio."""
        return self.mean_kl <= MAX_SOUND_KL and self.top1 >= MIN_SOUND_TOP1

    def passes(self, control: Score) -> bool:
        return (
            control.sound()
            and self.sound()
            and self.mean_kl <= MAX_MEAN_KL_RATIO * control.mean_kl
            and self.top1 >= control.top1 - MAX_TOP1_LOSS
        )


def mark_decoded(kinds_and_ids: list[tuple[str, list[int]]]) -> list[Text]:
    """Choose which texts are decoded too: one in DECODE_EVERY, and the longest."""
    longest = max(range(len(kinds_and_ids)), key=lambda i: len(kinds_and_ids[i][1]))
    return [
        Text(
            kind,
            ids,
            DECODE_TOKENS
            if (i == longest or i % DECODE_EVERY == 0) and len(ids) > 2 * DECODE_TOKENS
            else 0,
        )
        for i, (kind, ids) in enumerate(kinds_and_ids)
    ]


def kl_and_top1(
    reference: NDArray[np.float32], served: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Per position, KL(reference || served) in nats and whether the most likely token is the same.

    Both (positions, vocabulary) natural log-probabilities. A served value that is not finite where
    the reference gives probability makes the position's KL infinite: garbage must not average away.
    """
    assert reference.shape == served.shape, (reference.shape, served.shape)
    p = reference.astype(np.float64)
    q = served.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        kl = (np.exp(p) * (p - q)).sum(-1)
    kl[~np.isfinite(q).all(-1)] = np.inf
    # Rounding can leave a KL of -1e-9. The most likely of NaNs is no token at all.
    same = (p.argmax(-1) == q.argmax(-1)) & np.isfinite(q).all(-1)
    return np.maximum(kl, 0.0), same


# --- the served side: one process per checkpoint --------------------------------------------------


def served_distributions(checkpoint: Path, profile: Path, texts: list[Text], out: Path) -> None:
    """Write vLLM's log-probabilities of each text to `out/prefill-I.npy` and `out/decode-I.npy`.

    vLLM sends a request's full-vocabulary log-probabilities to its front end as tensors and turns
    them there into one Python object per token: gigabytes for a text of 3,000 tokens. They are
    taken as tensors instead, right before.
    """
    import torch
    from vllm import SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forced(AdapterLogitsProcessor):
        """Makes the sampler emit a given text; log-probabilities are taken before it acts
        (raw_logprobs)."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            text: list[int] | None = (params.extra_args or {}).get("forced")
            if text is None:
                return None

            def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                wanted = text[len(output_ids)]
                logits.fill_(float("-inf"))
                logits[wanted] = 0.0
                return logits

            return force

    captured: list[torch.Tensor] = []

    def dense(token_ids: Any, logprobs: Any) -> torch.Tensor:
        """(n, 1 + V) ids and values, the first column repeating one of the others -> (n, V) by
        token id."""
        ids = torch.as_tensor(token_ids).long()
        values = torch.as_tensor(logprobs).float()
        rows = torch.full((values.shape[0], values.shape[1] - 1), float("nan"))
        return rows.scatter_(1, ids, values)

    def keep_prompt(self: Any, tensors: Any) -> None:
        captured.append(dense(tensors[0], tensors[1]))

    def keep_sample(self: Any, lists: Any) -> None:
        captured.append(dense(lists[0], lists[1]))

    LogprobsProcessor._update_prompt_logprobs = keep_prompt  # type: ignore[method-assign]
    LogprobsProcessor._update_sample_logprobs = keep_sample  # type: ignore[method-assign]

    llm = start_engine(checkpoint, profile, max_logprobs=-1, logits_processors=[Forced])
    for i, text in enumerate(texts):
        prompt: Any = {"prompt_token_ids": text.ids}
        plan = SamplingParams(max_tokens=1, prompt_logprobs=-1, temperature=0, detokenize=False)
        llm.generate(prompt, plan, use_tqdm=False)
        np.save(out / f"prefill-{i}.npy", torch.cat(captured).numpy())
        captured.clear()
        if text.decode:
            head, tail = text.ids[: -text.decode], text.ids[-text.decode :]
            plan = SamplingParams(
                max_tokens=text.decode, logprobs=-1, temperature=0, detokenize=False,
                ignore_eos=True, extra_args={"forced": tail},
            )  # fmt: skip
            answer = llm.generate({"prompt_token_ids": head}, plan, use_tqdm=False)
            emitted = list(answer[0].outputs[0].token_ids)
            assert emitted == tail, "the sampler did not emit the text it was given"
            np.save(out / f"decode-{i}.npy", torch.cat(captured).numpy())
            captured.clear()


def run_worker(checkpoint: Path, profile: Path, texts: list[Text], mode: str, out: Path) -> None:
    """`served_distributions` in a process of its own, so that each checkpoint has a fresh vLLM."""
    out.mkdir(parents=True, exist_ok=True)
    job = out / "job.json"
    job.write_text(
        json.dumps(
            {
                "checkpoint": str(checkpoint),
                "profile": str(profile),
                "texts": [asdict(t) for t in texts],
            }
        )
    )
    log = out / "vllm.log"
    environment = os.environ | {"ASSAY_ARITHMETIC": mode}
    with log.open("wb") as sink:
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--worker", str(job)],
                stdout=sink, stderr=subprocess.STDOUT, env=environment,
                timeout=WORKER_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CannotMeasureError(f"vLLM took more than {WORKER_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise CannotMeasureError(f"vLLM on {checkpoint.name} exited {done.returncode}:\n{tail}")


# --- the reference side ---------------------------------------------------------------------------


def reference_distributions(checkpoint: Path, texts: list[Text]) -> Iterator[NDArray[np.float32]]:
    """transformers' fp32 log-probabilities (tokens, vocabulary) of each text, on the dequantised
    weights."""
    import torch

    from assay_kernels.checkpoint.hf import load_transformers_model

    model = load_transformers_model(checkpoint, torch.float32).eval()
    for text in texts:
        with torch.inference_mode():
            logits = model(torch.tensor([text.ids]), use_cache=False).logits[0].float()
            yield logits.log_softmax(-1).numpy()


def score(dialect: str, checkpoint: Path, texts: list[Text], served: Path) -> Score:
    """Hold what `run_worker` wrote against the reference."""
    kls, same, decode_kls = [], [], []
    for i, (text, reference) in enumerate(
        zip(texts, reference_distributions(checkpoint, texts), strict=True)
    ):
        # Position t predicts token t + 1, so the last one has nothing to predict.
        kl, top = kl_and_top1(reference[:-1], np.load(served / f"prefill-{i}.npy"))
        kls.append(kl)
        same.append(top)
        if text.decode:
            rows = reference[-text.decode - 1 : -1]
            kl, top = kl_and_top1(rows, np.load(served / f"decode-{i}.npy"))
            kls.append(kl)
            same.append(top)
            decode_kls.append(kl)
    kl, top = np.concatenate(kls), np.concatenate(same)
    decode = np.concatenate(decode_kls) if decode_kls else np.zeros(0)
    return Score(
        dialect=dialect, positions=len(kl), mean_kl=float(kl.mean()),
        trimmed_kl=float(np.sort(kl)[: int(len(kl) * (1 - TRIMMED))].mean()),
        p99_kl=float(np.quantile(kl, 0.99, method="higher")), max_kl=float(kl.max()),
        top1=float(top.mean()), decode_positions=len(decode),
        decode_mean_kl=float(decode.mean()) if len(decode) else float("nan"),
    )  # fmt: skip


# --- texts ----------------------------------------------------------------------------------------


def read_texts(checkpoint: Path, seed: int, positions: int) -> list[Text]:
    """Conversations with their answers, drawn anew by the miniature's own generator, wordings that
    training never saw included; the first one is longer than LONG_PROMPT tokens. At least
    `positions` tokens in all."""
    from tokenizers import Tokenizer

    sys.path.insert(0, str(REPO / "models"))
    from miniature import generate
    from miniature.chat import prompt_text

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    rng = random.Random(seed)

    def ids_of(sample: Any) -> list[int]:
        ids: list[int] = tokenizer.encode(prompt_text(sample.chat), add_special_tokens=False).ids
        return ids

    sentences = 150
    long = generate.haystack(rng, sentences=sentences, needles=12, early=True)
    while len(ids_of(long)) < LONG_PROMPT:
        sentences += 10
        long = generate.haystack(rng, sentences=sentences, needles=12, early=True)
    drawn = [
        (long.category, ids_of(long)[:MAX_TOKENS]),
        ("story", ids_of(generate.long_story(rng))),
    ]
    while sum(len(ids) for _, ids in drawn) < positions:
        maker = rng.choice([m for m, _ in generate.SHORT_MIX])
        sample = maker(rng, bool(len(drawn) % 2))
        drawn.append((sample.category, ids_of(sample)))
    return mark_decoded([(kind, ids[:MAX_TOKENS]) for kind, ids in drawn])


# --- the command ----------------------------------------------------------------------------------


def measure(
    source: Path, dialects: list[str], mode: str, texts: list[Text], work: Path, profile: Path
) -> dict[str, Score]:
    """Scores by dialect; derives each checkpoint from the dialect-B `source`."""
    from assay_kernels.checkpoint import Dialect
    from assay_kernels.checkpoint.export import derive

    scores: dict[str, Score] = {}
    for dialect in dialects:
        print(f"scoring {dialect}", file=sys.stderr, flush=True)
        started = time.monotonic()
        checkpoint = source
        if dialect != "B":
            checkpoint = work / f"checkpoint-{dialect}"
            derive(source, checkpoint, Dialect(dialect))
        served = work / f"served-{dialect}"
        run_worker(checkpoint, profile, texts, mode, served)
        found = score(dialect, checkpoint, texts, served)
        scores[dialect] = replace(found, seconds=time.monotonic() - started)
        for part in served.glob("*.npy"):
            part.unlink()
    return scores


def table(scores: dict[str, Score], judged: bool) -> str:
    """The aligned table; `judged` False where no bound was ever promised (w4a4)."""
    control = scores[CONTROL]
    head = (
        f"{'dialect':>7}  {'positions':>9}  {'mean KL':>9}  {'trimmed':>9}  {'p99 KL':>9}  "
        f"{'max KL':>9}  {'top-1 %':>7}  {'decode KL':>9}  {'KL ratio':>8}  {'s':>4}  verdict"
    )
    lines = [head]
    for s in scores.values():
        verdict = "control"
        if s is not control:
            verdict = ("pass" if s.passes(control) else "FAIL") if judged else "no bound"
        lines.append(
            f"{s.dialect:>7}  {s.positions:9d}  {s.mean_kl:9.6f}  {s.trimmed_kl:9.6f}  "
            f"{s.p99_kl:9.5f}  {s.max_kl:9.4f}  {100 * s.top1:7.2f}  {s.decode_mean_kl:9.6f}  "
            f"{s.mean_kl / control.mean_kl:8.3f}  "
            f"{s.seconds:4.0f}  {verdict}"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="dialect-B checkpoint")
    parser.add_argument(
        "--dialects", default=",".join(DIALECTS), help="of A, B, C; comma separated"
    )
    parser.add_argument("--mode", choices=MODES, default="w4a16", help="arithmetic of the plugin")
    parser.add_argument("--seed", type=int, default=20260, help="texts: another seed, other texts")
    parser.add_argument("--positions", type=int, default=6000, help="tokens of text, at least")
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        job = json.loads(options.worker.read_text())
        served_distributions(
            Path(job["checkpoint"]), Path(job["profile"]),
            [Text(**t) for t in job["texts"]], options.worker.parent,
        )  # fmt: skip
        return 0
    dialects = [d for d in options.dialects.split(",") if d]
    if not dialects or not set(dialects) <= set(DIALECTS):
        parser.error(f"--dialects: {options.dialects}: choose from {', '.join(DIALECTS)}")
    if options.positions < MIN_POSITIONS:
        parser.error(f"--positions: at least {MIN_POSITIONS}")
    try:
        if not (options.checkpoint / "config.json").is_file():
            raise CannotMeasureError(f"{options.checkpoint}: no config.json there")
        texts = read_texts(options.checkpoint, options.seed, options.positions)
        with tempfile.TemporaryDirectory(prefix="assay-agreement-") as work:
            scores = measure(
                options.checkpoint,
                [CONTROL, *dialects],
                options.mode,
                texts,
                Path(work),
                options.profile,
            )
    except CannotMeasureError as error:
        print(f"agreement: could not measure: {error}", file=sys.stderr)
        return 2
    except Exception:  # 1 is kept for what was measured and found wanting
        print("agreement: could not measure:", file=sys.stderr)
        traceback.print_exc()
        return 2
    control = scores[CONTROL]
    judged = options.mode != "w4a4"
    longest = max(len(t.ids) for t in texts)
    print(
        f"{options.mode}, {len(texts)} texts (seed {options.seed}), longest {longest} tokens; "
        f"vLLM + plugin against transformers fp32 on the dequantised weights"
    )
    print(table(scores, judged))
    passed = all(s.passes(control) for d, s in scores.items() if d != CONTROL) or not judged
    if options.json:
        figures = {
            "mode": options.mode, "seed": options.seed, "longest_prompt": longest,
            "bounds": {
                "mean_kl_ratio": MAX_MEAN_KL_RATIO, "top1_loss": MAX_TOP1_LOSS,
                "mean_kl": MAX_SOUND_KL, "top1": MIN_SOUND_TOP1,
            },
            "judged": judged, "passed": passed, "scores": [asdict(s) for s in scores.values()],
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
