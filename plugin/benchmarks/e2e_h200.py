"""vLLM with the plugin on an H200, end to end: is it coherent, how fast beside vLLM's kernels?

Two phases, each below eight minutes and each keeping what it found, so that a machine lent for ten
minutes at a time is enough:

    e2e_h200.py --phase miniature   the miniature in dialects B and A and unquantised, against
                                    transformers in fp32: alone, token by token, and among 64
    e2e_h200.py --phase flash       layers of V4-Flash's width in dialect A: decode and prefill
                                    tokens/s beside Humming (vLLM's default) and Marlin, in turn

Everything is written to `results/h200-e2e.json`: `environment`, `agreement`, and `rows` of
{dialect, backend, phase, batch, tokens_per_s, low, high}. Needs vLLM 0.33.0 and this package in the
Python that runs it.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
from agreement import Text, kl_and_top1, read_texts, reference_distributions
from offline import CHECKPOINT, REPO, start_engine

RESULT = REPO / "plugin" / "benchmarks" / "results" / "h200-e2e.json"
PROFILE = Path(__file__).with_name("e2e_h200.yaml")
DECODED = 24
"""Tokens decoded from each prompt where the distributions are compared."""
CROWD = 64
PHASE_SECONDS = 470.0
MINIATURE_DIALECTS = ("B", "bf16", "A")
BACKENDS = ("assay", "humming", "marlin")
BATCHES = (1, 16, 64, 256)
PREFILL = (4, 2048)
DECODE_STEPS = 64
PASSES = 7
RESAMPLES = 2000
FLASH_LAYERS = 4


ENVIRONMENT = {
    # The self-check's table is in the log.
    "VLLM_LOGGING_LEVEL": "INFO",
    # Nothing compiled ahead for sizes that are not met here, and no sampler that is not installed.
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",
}


def log(*words: object) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s ", *words, flush=True)


BEGAN = time.monotonic()


# --- a process with one engine --------------------------------------------------------------------


class Worker:
    """An engine in a process of its own; it answers one JSON line with another."""

    def __init__(self, name: str, job: dict[str, Any], folder: Path, **variables: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        path = folder / f"{name}.json"
        path.write_text(json.dumps(job | {"out": str(folder / name)}))
        (folder / name).mkdir(exist_ok=True)
        self._sink = self.log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._sink, text=True,
            env=os.environ | ENVIRONMENT
            | {"ASSAY_RUN_DIR": str(folder / name), "ASSAY_CACHE_DIR": str(folder / name)}
            | variables,
        )  # fmt: skip

    def hear(self) -> dict[str, Any]:
        """Its next answer; raises RuntimeError with the end of its log when it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        self._process.wait()
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{self.name} exited {self._process.returncode}:\n{tail}")

    def tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        self.tell(command)
        return self.hear()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._sink.close()


def worker(job: dict[str, Any]) -> None:
    """Start the engine, then answer commands until the input ends."""
    import torch

    began = time.monotonic()
    # Answers alone go to the parent; whatever else is printed goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(f"ANSWER {json.dumps(value)}\n")
        answers.flush()

    llm = start_engine(Path(job["checkpoint"]), Path(job["profile"]), **job["arguments"])
    engine = _Engine(llm, Path(job["out"]), job["vocabulary"])
    used = torch.cuda.max_memory_allocated() / 2**30
    answer({"ready_s": time.monotonic() - began, "peak_gib": used})
    for line in sys.stdin:
        command = json.loads(line)
        answer(getattr(engine, command.pop("do"))(**command) or {})


class _Engine:
    """What a worker can be asked to do."""

    def __init__(self, llm: Any, out: Path, vocabulary: int) -> None:
        self.llm = llm
        self.out = out
        self.vocabulary = vocabulary
        self._captured: dict[int, list[Any]] = {}
        self._capture()

    def _capture(self) -> None:
        """Take whole distributions as tensors, before vLLM makes one object of each value."""
        import torch
        from vllm.v1.engine.logprobs import LogprobsProcessor

        captured = self._captured

        def keep(self: Any, found: Any) -> None:
            ids = torch.as_tensor(found[0]).long()
            values = torch.as_tensor(found[1]).float()
            rows = torch.full((values.shape[0], values.shape[1] - 1), float("nan"))
            captured.setdefault(id(self), []).append(rows.scatter_(1, ids, values))

        LogprobsProcessor._update_prompt_logprobs = keep  # type: ignore[method-assign]
        LogprobsProcessor._update_sample_logprobs = keep  # type: ignore[method-assign]

    def _distributions(self) -> list[Any]:
        import torch

        found = [torch.cat(rows).numpy() for rows in self._captured.values()]
        self._captured.clear()
        return found

    def prefill(self, ids: list[int], name: str) -> None:
        """Distributions at every position of a prompt, to NAME.npy."""
        from vllm import SamplingParams

        plan = SamplingParams(max_tokens=1, prompt_logprobs=-1, temperature=0, detokenize=False)
        self.llm.generate({"prompt_token_ids": ids}, plan, use_tqdm=False)
        np.save(self.out / f"{name}.npy", self._distributions()[0])

    def decode(self, prompts: list[list[int]], name: str) -> dict[str, Any]:
        """Greedy tokens after each prompt, all at once; their distributions to NAME-I.npy."""
        from vllm import SamplingParams

        plan = SamplingParams(
            max_tokens=DECODED, logprobs=-1, temperature=0, detokenize=False, ignore_eos=True
        )
        answers = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], plan, use_tqdm=False
        )
        tokens = [list(a.outputs[0].token_ids) for a in answers]
        # They come in the engine's order: greedy tokens tell whose they are, but for a tie.
        found = self._distributions()
        by_tokens = {tuple(rows.argmax(-1).tolist()): rows for rows in found}
        for i, emitted in enumerate(tokens):
            np.save(self.out / f"{name}-{i}.npy", by_tokens.get(tuple(emitted), found[i]))
        return {"tokens": tokens}

    def _timed(self, batch: int, length: int, tokens: int, seed: int) -> float:
        import torch
        from vllm import SamplingParams

        rng = random.Random(seed)
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, self.vocabulary) for _ in range(length)]}
            for _ in range(batch)
        ]
        plan = SamplingParams(
            max_tokens=tokens, min_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.llm.generate(prompts, plan, use_tqdm=False)
        return time.perf_counter() - began

    def decode_speed(self, batch: int, seed: int) -> dict[str, Any]:
        """Decode tokens/s: what DECODE_STEPS more steps take."""
        one = self._timed(batch, 128, 1, seed)
        more = self._timed(batch, 128, 1 + DECODE_STEPS, seed)
        return {"tokens_per_s": batch * DECODE_STEPS / (more - one)}

    def prefill_speed(self, batch: int, length: int, seed: int) -> dict[str, Any]:
        """Prefill tokens/s."""
        return {"tokens_per_s": batch * length / self._timed(batch, length, 1, seed)}


# --- the miniature against transformers -----------------------------------------------------------


def miniature(folder: Path, deadline: float, positions: int) -> dict[str, Any]:
    """Agreement by dialect, as far as the time allows; B first."""
    from assay_kernels.checkpoint import Dialect
    from assay_kernels.checkpoint.export import derive

    texts = read_texts(CHECKPOINT, 20260, positions)
    found: dict[str, Any] = {}
    started: dict[str, tuple[Path, Worker]] = {}
    try:
        for dialect in MINIATURE_DIALECTS:
            checkpoint = CHECKPOINT
            if dialect != "B":
                checkpoint = folder / f"checkpoint-{dialect}"
                derive(CHECKPOINT, checkpoint, Dialect(dialect))
            job = {
                "checkpoint": str(checkpoint), "profile": str(PROFILE), "vocabulary": 4096,
                "arguments": {"max_logprobs": -1},
            }  # fmt: skip
            started[dialect] = checkpoint, Worker(f"miniature-{dialect}", job, folder)
            # What the first one compiles, the others find.
            if dialect == "B":
                found[dialect] = _attempt(lambda: _agree(*started["B"], texts, folder))
                log("B", json.dumps(found[dialect]))
        for dialect in MINIATURE_DIALECTS[1:]:
            if time.monotonic() > deadline:
                break
            found[dialect] = _attempt(lambda d=dialect: _agree(*started[d], texts, folder))  # type: ignore[misc]
            log(dialect, json.dumps(found[dialect]))
    finally:
        for _, process in started.values():
            process.end()
    return found


def _attempt(measure: Any) -> dict[str, Any]:
    try:
        result: dict[str, Any] = measure()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    return result


def _agree(
    checkpoint: Path, process: Worker, texts: Sequence[Text], folder: Path
) -> dict[str, Any]:
    """Distances of one served checkpoint from transformers on its own weights."""
    ready = process.hear()
    log(process.name, "ready", ready)
    out = folder / process.name
    heads = [text.ids[: -text.decode] for text in texts if text.decode]
    # The long text once alone; a crowd of it would only measure its prefill.
    short = heads[1:] or heads
    crowd = [short[i % len(short)] for i in range(CROWD)]
    for i, text in enumerate(texts):
        process.ask({"do": "prefill", "ids": text.ids, "name": f"prefill-{i}"})
    log(process.name, "prefilled")
    alone = [
        process.ask({"do": "decode", "prompts": [head], "name": f"alone-{i}"})["tokens"][0]
        for i, head in enumerate(heads)
    ]
    among = process.ask({"do": "decode", "prompts": crowd, "name": "among"})["tokens"]
    log(process.name, "decoded")
    speeds = {
        batch: process.ask({"do": "decode_speed", "batch": batch, "seed": batch})["tokens_per_s"]
        for batch in (1, 16, 64)
        for _ in range(2)  # the second counts
    }
    served = [text.ids for text in texts]
    kls: dict[str, list[Any]] = {"prefill": [], "alone": [], "among": []}
    same: list[Any] = []

    def take(kind: str, reference: Any, stored: Path) -> None:
        kl, top = kl_and_top1(reference, np.load(stored))
        kls[kind].append(kl)
        same.append(top)

    crowd_texts = list({(tuple(h), tuple(t)): [*h, *t] for h, t in zip(crowd, among, strict=True)})
    wanted = served + [[*h, *t] for h, t in zip(heads, alone, strict=True)]
    wanted += [[*h, *t] for h, t in crowd_texts]
    references = reference_distributions(checkpoint, [Text("", ids, 0) for ids in wanted])
    for i, _ in enumerate(served):
        take("prefill", next(references)[:-1], out / f"prefill-{i}.npy")
    for i, head in enumerate(heads):
        take("alone", next(references)[len(head) - 1 : -1], out / f"alone-{i}-0.npy")
    by_text = {}
    for head, tokens in crowd_texts:
        by_text[head, tokens] = next(references)[len(head) - 1 : -1]
    for j, (head, tokens) in enumerate(zip(crowd, among, strict=True)):
        take("among", by_text[tuple(head), tuple(tokens)], out / f"among-{j}.npy")
    everything = np.concatenate([kl for part in kls.values() for kl in part])
    checked = out / "assay" / "selfcheck-rank0.json"
    return ready | {
        "selfcheck": json.loads(checked.read_text()) if checked.is_file() else None,
        "positions": len(everything),
        "mean_kl": float(everything.mean()),
        "max_kl": float(everything.max()),
        "top1": float(np.concatenate(same).mean()),
        **{f"{kind}_mean_kl": float(np.concatenate(part).mean()) for kind, part in kls.items()},
        "alone_equals_among": _share_of_equal(heads, alone, crowd, among),
        "decode_tokens_per_s": speeds,
    }


def _share_of_equal(
    heads: list[list[int]], alone: list[list[int]], crowd: list[list[int]], among: list[list[int]]
) -> float:
    """Of the crowd's answers, how many are what the prompt alone gave, token for token."""
    by_head = {tuple(h): t for h, t in zip(heads, alone, strict=True)}
    equal = [by_head[tuple(h)] == t for h, t in zip(crowd, among, strict=True)]
    return sum(equal) / len(equal)


# --- V4-Flash's width, beside vLLM's own kernels --------------------------------------------------


def flash(folder: Path, deadline: float, layers: int) -> list[dict[str, Any]]:
    """Rows of tokens/s with intervals of the mean over passes; backends in turn."""
    checkpoint = make_flash(folder / "flash", layers)
    log("checkpoint written")
    job = {
        "checkpoint": str(checkpoint), "profile": str(PROFILE), "vocabulary": 129280,
        "arguments": {
            "max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 8192,
            "load_format": "auto", "gpu_memory_utilization": 0.3,
            "kv_cache_memory_bytes": 8 * 2**30,
        },
    }  # fmt: skip
    stock = {"ASSAY_KERNELS": "library", "ASSAY_REQUIRE": "0"}
    workers: dict[str, Worker] = {}
    samples: dict[tuple[str, str, int], list[float]] = {}
    try:
        # Started in turn: they share what they compile and the CPU that compiles it.
        for backend in BACKENDS:
            arguments = dict(job["arguments"])  # type: ignore[call-overload]
            if backend != "assay":
                arguments["moe_backend"] = backend
            variables = {} if backend == "assay" else stock
            process = Worker(
                f"flash-{backend}", job | {"arguments": arguments}, folder, **variables
            )
            try:
                log(backend, "ready", process.hear())
                for batch in BATCHES:
                    process.ask({"do": "decode_speed", "batch": batch, "seed": 0})
                process.ask({"do": "prefill_speed", "batch": PREFILL[0], "length": PREFILL[1],
                             "seed": 0})  # fmt: skip
                workers[backend] = process
            except RuntimeError as error:
                log(backend, error)
                process.end()
            if time.monotonic() > deadline:
                break
        log("warm")
        for n in range(PASSES):
            for backend, process in workers.items():
                for batch in BATCHES:
                    found = process.ask({"do": "decode_speed", "batch": batch, "seed": n})
                    key = (backend, "decode", batch)
                    samples.setdefault(key, []).append(found["tokens_per_s"])
                found = process.ask({"do": "prefill_speed", "batch": PREFILL[0],
                                     "length": PREFILL[1], "seed": n})  # fmt: skip
                key = (backend, "prefill", PREFILL[0])
                samples.setdefault(key, []).append(found["tokens_per_s"])
            log("pass", n)
            if time.monotonic() > deadline:
                break
    finally:
        for process in workers.values():
            process.end()
    rows = []
    for (backend, phase, batch), values in samples.items():
        low, high = interval(values)
        rows.append(
            {
                "dialect": "A", "backend": backend, "phase": phase, "batch": batch,
                "tokens_per_s": float(np.mean(values)), "low": low, "high": high,
                "passes": len(values),
            }
        )  # fmt: skip
    return rows


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the mean, by resampling the passes."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(np.asarray(values), (RESAMPLES, len(values))).mean(axis=1)
    return float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16", "vocab_size": 129280, "hidden_size": 4096,
    "moe_intermediate_size": 2048, "num_attention_heads": 64, "num_key_value_heads": 1,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
    "o_lora_rank": 1024, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "num_hash_layers": 1, "swiglu_limit": 10.0,
    "sliding_window": 128, "compress_rope_theta": 160000.0, "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                     "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1048576, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "expert_dtype": "fp4", "bos_token_id": 0, "eos_token_id": 1,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
        "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "moe_quant_algo": "NVFP4",
    },
}  # fmt: skip


def make_flash(folder: Path, layers: int) -> Path:
    """Random weights of V4-Flash's width in dialect A, one shard a layer; made once."""
    import torch
    from safetensors.torch import save_file

    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True)
    ratios = ([0, 4, 128] + [4, 128] * layers)[:layers]
    config = FLASH | {"num_hidden_layers": layers, "compress_ratios": ratios}
    shards = {"outer": _outer(config)}
    save_file(shards["outer"], folder / "model-outer.safetensors", metadata={"format": "pt"})
    del shards
    for layer in range(layers):
        tensors = _layer(config, layer)
        save_file(tensors, folder / f"model-{layer}.safetensors", metadata={"format": "pt"})
        torch.cuda.empty_cache()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _normal(source: Any, *shape: int, std: float) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", generator=source) * std


def _source(seed: int) -> Any:
    import torch

    return torch.Generator(device="cuda").manual_seed(seed)


def _outer(c: dict[str, Any]) -> dict[str, Any]:
    import torch

    source, hidden, mult = _source(999), c["hidden_size"], c["hc_mult"]
    bf16 = torch.bfloat16
    return {
        "embed.weight": _normal(source, c["vocab_size"], hidden, std=1.0).to(bf16).cpu(),
        "head.weight": _normal(source, c["vocab_size"], hidden, std=hidden**-0.5).to(bf16).cpu(),
        "norm.weight": torch.ones(hidden, dtype=bf16),
        "hc_head_fn": _normal(source, mult, mult * hidden, std=0.01).cpu(),
        "hc_head_base": _normal(source, mult, std=0.1).cpu(),
        "hc_head_scale": torch.ones(1),
    }


def _layer(c: dict[str, Any], layer: int) -> dict[str, Any]:
    import torch

    source, out = _source(layer), {}
    hidden, width, experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    heads, dim, rank = c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
    groups, mult, ratio = c["o_groups"], c["hc_mult"], c["compress_ratios"][layer]
    at = f"layers.{layer}."

    def plain(name: str, *shape: int, std: float | None = None) -> None:
        values = _normal(source, *shape, std=shape[-1] ** -0.5 if std is None else std)
        out[at + name] = values.to(torch.bfloat16).cpu()

    def single(name: str, *shape: int, std: float = 0.05) -> None:
        out[at + name] = _normal(source, *shape, std=std).cpu()

    def ones(name: str, size: int, dtype: torch.dtype = torch.bfloat16) -> None:
        out[at + name] = torch.ones(size, dtype=dtype)

    def fp8(name: str, n: int, k: int) -> None:
        values = _normal(source, n, k, std=32.0).clamp_(-440, 440)
        out[f"{at}{name}.weight"] = values.to(torch.float8_e4m3fn).cpu()
        exponent = 127 + round(float(np.log2(k**-0.5 / 32)))
        scale = torch.full((-(-n // 128), -(-k // 128)), exponent, dtype=torch.uint8)
        out[f"{at}{name}.scale"] = scale.view(torch.float8_e8m0fnu)

    def compressor(name: str, size: int) -> None:
        plain(f"{name}.wkv.weight", size * (1 + (ratio == 4)), hidden)
        plain(f"{name}.wgate.weight", size * (1 + (ratio == 4)), hidden)
        single(f"{name}.ape", ratio, size * (1 + (ratio == 4)))
        ones(f"{name}.norm.weight", size)

    ones("attn_norm.weight", hidden)
    ones("ffn_norm.weight", hidden)
    for part in ("attn", "ffn"):
        single(f"hc_{part}_fn", (2 + mult) * mult, mult * hidden, std=0.01)
        single(f"hc_{part}_base", (2 + mult) * mult, std=0.1)
        ones(f"hc_{part}_scale", 3, torch.float32)
    fp8("attn.wq_a", rank, hidden)
    fp8("attn.wkv", dim, hidden)
    fp8("attn.wq_b", heads * dim, rank)
    fp8("attn.wo_a", groups * c["o_lora_rank"], heads * dim // groups)
    fp8("attn.wo_b", hidden, groups * c["o_lora_rank"])
    ones("attn.q_norm.weight", rank)
    ones("attn.kv_norm.weight", dim)
    single("attn.attn_sink", heads)
    if ratio:
        compressor("attn.compressor", dim)
    if ratio == 4:
        fp8("attn.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], rank)
        plain("attn.indexer.weights_proj.weight", c["index_n_heads"], hidden)
        compressor("attn.indexer.compressor", c["index_head_dim"])
    plain("ffn.gate.weight", experts, hidden)
    if layer < c["num_hash_layers"]:
        first = torch.randint(0, experts, (c["vocab_size"], 1))
        out[f"{at}ffn.gate.tid2eid"] = (first + torch.arange(6) * 37) % experts
    else:
        single("ffn.gate.bias", experts)
    for name, n, k in (("w1", width, hidden), ("w2", hidden, width), ("w3", width, hidden)):
        fp8(f"ffn.shared_experts.{name}", n, k)
        codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device="cuda")
        codes = codes.random_(0, 256, generator=source).cpu()
        scale = torch.empty(experts, n, k // 16, dtype=torch.uint8, device="cuda")
        scale = scale.random_(0x68, 0x77, generator=source).cpu().view(torch.float8_e4m3fn)
        for expert in range(experts):
            entry = f"{at}ffn.experts.{expert}.{name}."
            out[f"{entry}weight"] = codes[expert].clone()
            out[f"{entry}weight_scale"] = scale[expert].clone()
            # 2.93: the codes' root mean square; 140: the scales' middle.
            out[f"{entry}weight_scale_2"] = torch.tensor(0.02 / (2.93 * 140))
            out[f"{entry}input_scale"] = torch.tensor(0.01)
    return out


# --- the command ----------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    from importlib.metadata import version

    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "vllm": version("vllm"),
        "cutlass_dsl": version("nvidia-cutlass-dsl"),
        "date": time.strftime("%Y-%m-%d"),
    }


@contextmanager
def working_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="assay-e2e-") as made:
        yield Path(made)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a phase and batch, one column a backend: tokens/s with its interval."""
    lines = ["| phase | batch | " + " | ".join(BACKENDS) + " |", "|---" * (2 + len(BACKENDS)) + "|"]
    cells = {(r["phase"], r["batch"], r["backend"]): r for r in rows}
    for phase, batch in dict.fromkeys((r["phase"], r["batch"]) for r in rows):
        line = f"| {phase} | {batch} |"
        for backend in BACKENDS:
            r = cells.get((phase, batch, backend))
            line += (
                f" {r['tokens_per_s']:,.0f} ({r['low']:,.0f}-{r['high']:,.0f}) |" if r else " – |"
            )
        lines.append(line)
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phase", choices=("miniature", "flash"), action="append")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--work", type=Path, help="keep checkpoints and logs there")
    parser.add_argument("--seconds", type=float, default=PHASE_SECONDS, help="of a phase, at most")
    parser.add_argument("--positions", type=int, default=4500)
    parser.add_argument("--layers", type=int, default=FLASH_LAYERS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        worker(json.loads(options.worker.read_text()))
        return 0
    if not entry_points(group="vllm.general_plugins", name="assay"):
        # On the path alone it is not found by vLLM, which then serves with its own kernels.
        print("e2e_h200: assay-kernels is not installed here: vLLM needs its entry point")
        return 2
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    with working_folder(options.work) as folder:
        for phase in options.phase or ("miniature", "flash"):
            deadline = time.monotonic() + options.seconds
            if phase == "miniature":
                result = miniature(folder, deadline, options.positions)
                found["agreement"] = found.get("agreement", {}) | result
            else:
                found["rows"] = flash(folder, deadline, options.layers)
                print(table(found["rows"]))
            found["environment"] = environment()
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    errors = [v["error"] for v in found.get("agreement", {}).values() if "error" in v]
    return 2 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
