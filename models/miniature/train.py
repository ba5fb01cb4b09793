"""Train the miniature on one GPU, in minutes, resumable.

usage: python -m miniature.train --work DIR --steps TOTAL --seconds BUDGET [--resume] [--out DIR]
[--profile]
Two calls with the same --steps and --work continue one run: the schedule depends on the step alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from . import battery, export
from . import model as m
from .chat import Chat
from .data import LONG_ROW, encode, load_tokenizer, rows_of

TOKENIZER = Path(__file__).parent / "checkpoint"
TOKENS_A_STEP = 65_536
SHORT_ROW = 1024

# ---------------------------------------------------------------- the plan, by progress in 0..1

WARM, DECAY_FROM, LONG_FROM, LONG_OFTEN, ROUND_FROM, SELECT_FROM = (
    0.01,
    0.35,
    0.12,
    0.35,
    0.60,
    0.50,
)


def lr_scale(progress: float) -> float:
    """Warm-up, a plateau, then a straight line to 1 % of the peak."""
    if progress < WARM:
        return progress / WARM
    if progress < DECAY_FROM:
        return 1.0
    return 0.01 + 0.99 * max(0.0, (1 - progress) / (1 - DECAY_FROM))


def row_length(step: int, total: int) -> int:
    """Short rows first; then every sixth, later every fifth step on rows of 4,096."""
    progress = step / total
    every = 0 if progress < LONG_FROM else 6 if progress < LONG_OFTEN else 5
    return LONG_ROW if every and step % every == 0 else SHORT_ROW


# ---------------------------------------------------------------- batches, made by other processes


def _make(task: tuple[int, int, int, int]) -> tuple[int, Any]:
    seed, step, length, tokens = task
    return step, rows_of(TOKENIZER, random.Random(f"train-{seed}-{step}"), tokens // length, length)


class Batches:
    """Batch `step` depends on the seed and the step alone; workers run ahead of the training."""

    def __init__(
        self,
        pool: Any,
        seed: int,
        first: int,
        total: int,
        tokens: int,
        workers: int,
        device: torch.device,
    ) -> None:
        self.pool = pool
        self.ready: queue.Queue[Any] = queue.Queue(maxsize=12)
        self.device = device
        tasks = ((seed, s, row_length(s, total), tokens) for s in range(first, total))
        threading.Thread(target=self._run, args=(tasks, workers), daemon=True).start()

    def _run(self, tasks: Iterator[tuple[int, int, int, int]], workers: int) -> None:
        pending: list[Any] = []
        for task in tasks:
            pending.append(self.pool.apply_async(_make, (task,)))
            if len(pending) >= 4 * workers:
                self._put(pending.pop(0).get())
        for job in pending:
            self._put(job.get())

    def _put(self, made: tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        step, (ids, weight, doc) = made
        tensors = [
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(weight.astype(np.float32)),
            torch.from_numpy(doc.astype(np.int32)),
        ]
        if self.device.type == "cuda":
            tensors = [t.pin_memory() for t in tensors]
        self.ready.put((step, tensors))

    def next(self) -> tuple[int, list[Tensor]]:
        step, tensors = self.ready.get()
        return step, [t.to(self.device, non_blocking=True) for t in tensors]


# ---------------------------------------------------------------- optimiser


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz on a stack (n, rows, cols): all singular values towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.to(torch.bfloat16)
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.transpose(-2, -1)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        s = x @ x.transpose(-2, -1)
        x = a * x + (b * s + c * s @ s) @ x
    return x.transpose(-2, -1) if flip else x


def _blocks(name: str, p: Tensor) -> Tensor:
    """The stack of matrices that are orthogonalised one by one: experts, gate and up, heads."""
    if name.endswith("gate_up_proj"):
        return p.reshape(-1, m.INNER, m.WIDTH)
    if name.endswith("experts.down_proj"):
        return p
    if name.endswith("indexer.q_b_proj.weight"):
        return p.reshape(-1, m.INDEX_HEAD, p.shape[1])
    if name.endswith(("q_b_proj.weight",)):
        return p.reshape(-1, m.HEAD, p.shape[1])
    if name.endswith("o_a_proj.weight"):
        return p.reshape(m.HEADS, -1, p.shape[1])
    return p.unsqueeze(0)


class Optimiser:
    """Muon for the matrices, each step a fixed share of a matrix's initial size, so that w3 stays
    large against w1; AdamW for embeddings, norms, routers and hyper-connections.
    """

    def __init__(self, net: DeepseekV4ForCausalLM, relative: float, adam: float) -> None:
        self.relative = relative
        self.named = dict(net.named_parameters())
        self.matrices = [n for n in self.named if m.is_quantised(n)]
        self.unit = {n: torch.tensor(m.fan_rms(self.named[n])) for n in self.matrices}
        self.momentum = {n: torch.zeros_like(self.named[n]) for n in self.matrices}
        for n in self.matrices:  # gate and up keep their own unit
            if n.endswith("gate_up_proj"):
                p = self.named[n].detach()
                self.unit[n] = torch.stack(
                    [
                        torch.tensor(m.fan_rms(p[:, : m.INNER])),
                        torch.tensor(m.fan_rms(p[:, m.INNER :])),
                    ]
                )
            self.unit[n] = self.unit[n].to(self.named[n].device)
        rest = [n for n in self.named if n not in self.unit]
        rates: dict[float, list[Tensor]] = defaultdict(list)
        for n in rest:
            factor = (
                2.0
                if n.endswith(("position_bias", "sinks", "base"))
                else 0.5
                if n.endswith(("fn", "gate.weight"))
                else 1.0
            )
            rates[factor].append(self.named[n])
        groups = [{"params": ps, "factor": f} for f, ps in rates.items()]
        self.adam_rate = adam
        self.adam = torch.optim.AdamW(
            groups,
            lr=adam,
            betas=(0.9, 0.98),
            eps=1e-10,
            weight_decay=0.0,
            fused=torch.cuda.is_available(),
        )

    @torch.no_grad()
    def step(self, scale: float, progress: float) -> None:
        beta = 0.95 if progress > 0.02 else 0.85
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale * group["factor"]
        self.adam.step()
        shapes: dict[tuple[int, int], list[tuple[str, Tensor]]] = defaultdict(list)
        names = [n for n in self.matrices if self.named[n].grad is not None]
        grads = [self.named[n].grad for n in names]
        moments = [self.momentum[n] for n in names]
        torch._foreach_lerp_(moments, grads, 1 - beta)
        looks = torch._foreach_lerp(grads, moments, beta)
        for name, look in zip(names, looks, strict=True):
            blocks = _blocks(name, look)
            shapes[tuple(blocks.shape[-2:])].append((name, blocks))
        for members in shapes.values():
            update = orthogonalise(torch.cat([b for _, b in members])).float()
            update = update / (update.square().mean(dim=(-2, -1), keepdim=True).sqrt() + 1e-9)
            for (name, _), part in zip(
                members, update.split([len(b) for _, b in members]), strict=True
            ):
                p = self.named[name]
                unit = self.unit[name]
                if unit.dim():
                    unit = unit.view(1, 2, 1, 1)
                    part = part.view(m.EXPERTS, 2, m.INNER, m.WIDTH)
                else:
                    part = part.view_as(_blocks(name, p))
                decay = (
                    0.0
                    if name.endswith(("up_proj.weight", "gate_up_proj"))
                    else 0.05 * self.relative * scale
                )
                p.mul_(1 - decay).sub_((part * (unit * self.relative * scale)).reshape(p.shape))
        for p in self.named.values():
            p.grad = None

    def state(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        for n, v in state["momentum"].items():
            self.momentum[n].copy_(v)
        self.adam.load_state_dict(state["adam"])


# ---------------------------------------------------------------- judging


@torch.no_grad()
def generate(
    net: DeepseekV4ForCausalLM,
    prompts: list[list[int]],
    most: int,
    rounded: bool,
    tokens: int = 131_072,
) -> list[list[int]]:
    """Greedy answers without a cache: every step recomputes whole rows (short answers only)."""
    device = next(net.parameters()).device
    weights = m.working_weights(net, rounded)
    options = m.Options(fp8_cache=True, select=True)
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    while order:
        width = -(-(len(prompts[order[0]]) + most) // 128) * 128
        group = [i for i in order if len(prompts[i]) + most <= width + 256][
            : max(1, tokens // (width + 256))
        ]
        order = [i for i in order if i not in set(group)]
        width = -(-(max(len(prompts[i]) for i in group) + most) // 128) * 128
        turns = m.angles(net, width)
        ids = torch.full((len(group), width), 2, device=device)
        for row, i in enumerate(group):
            ids[row, : len(prompts[i])] = torch.tensor(prompts[i], device=device)
        at = torch.tensor([len(prompts[i]) for i in group], device=device)
        rows = torch.arange(len(group), device=device)
        alive = torch.ones(len(group), dtype=torch.bool, device=device)
        for n in range(most):
            hidden, _ = m.forward(weights, turns, ids, torch.zeros_like(ids), options)
            last = hidden.view(len(group), width, -1)[rows, at - 1]
            token = F.linear(last, weights["lm_head.weight"]).float().argmax(-1)
            ids[rows[alive], at[alive]] = token[alive]
            at = at + alive.long()
            alive = alive & (token != 1)
            if n % 4 == 3 and not bool(alive.any()):
                break
        ends = at.tolist()
        for row, i in enumerate(group):
            answers[i] = ids[row, len(prompts[i]) : ends[row]].tolist()
    return answers


def parse(text: str, thinking: bool) -> tuple[str, list[dict[str, Any]]]:
    """(content, tool calls) of generated text: a plain reading of V4's format, enough for judging
    here.
    """
    import re

    text = text.split("<｜end▁of▁sentence｜>")[0]
    if thinking:
        text = text.split("</think>", 1)[1] if "</think>" in text else ""
    head, mark, block = text.partition("<｜DSML｜tool_calls>")
    calls = []
    for name, body in (
        re.findall(r'<｜DSML｜invoke name="([^"]+)">\n(.*?)</｜DSML｜invoke>', block, re.S)
        if mark
        else []
    ):
        arguments: dict[str, Any] = {}
        for key, flag, value in re.findall(
            r'<｜DSML｜parameter name="([^"]+)" string="(\w+)">(.*?)</｜DSML｜parameter>',
            body,
            re.S,
        ):
            try:
                arguments[key] = value if flag == "true" else json.loads(value)
            except ValueError:
                arguments[key] = value
        calls.append({"function": {"name": name, "arguments": arguments}})
    return head.strip(), calls


def judge(
    net: DeepseekV4ForCausalLM, items: list[battery.Item], rounded: bool
) -> tuple[str, float, list[str]]:
    """(table, share right, wrong answers) of battery items."""
    tokenizer = load_tokenizer(TOKENIZER)
    results, wrong = [], []
    for limit in (
        100,
        300,
    ):  # few, large groups: every group costs as many passes as its longest answer has tokens
        group = [i for i in items if (i["max_tokens"] > 100) == (limit > 100)]
        if not group:
            continue
        prompts = [
            encode(tokenizer, Chat(i["messages"], i.get("tools", []), i["thinking"])) for i in group
        ]
        for item, ids in zip(group, generate(net, prompts, limit, rounded), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            right = battery.is_right(item, *parse(text, item["thinking"]))
            results.append((item, right))
            if not right:
                wrong.append(f"{item['id']}: expected {item['expected']!r}, got {text[:200]!r}")
    text, share = battery.table(results)
    return text, share, wrong


# ---------------------------------------------------------------- training


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--work", type=Path, required=True, help="checkpoints between calls")
    p.add_argument("--out", type=Path, required=True, help="results of this call")
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--stop", type=int, default=0, help="stop at this step (0: at --steps)")
    p.add_argument(
        "--seconds", type=float, default=1e9, help="stop after so many seconds, resumable"
    )
    p.add_argument("--resume", action="store_true")
    p.add_argument(
        "--init",
        type=Path,
        help="weights (parts of a state dict) to start from instead of random ones",
    )
    p.add_argument(
        "--at", type=int, default=0, help="with --init: the step that those weights belong to"
    )
    p.add_argument("--export", action="store_true", help="write the checkpoint at the end")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--tokens", type=int, default=TOKENS_A_STEP)
    p.add_argument("--workers", type=int, default=12)
    p.add_argument(
        "--relative",
        type=float,
        default=0.02,
        help="Muon's step as a share of a matrix's initial size",
    )
    p.add_argument("--adam", type=float, default=3e-3)
    p.add_argument("--no-compile", action="store_true")
    p.add_argument(
        "--profile",
        action="store_true",
        help="also time one step of every kind and print the kernels",
    )
    p.add_argument("--judge", choices=["none", "sample", "all"], default="sample")
    p.add_argument(
        "--force-progress",
        type=float,
        default=-1,
        help="for smoke tests: pretend to be here in the plan",
    )
    return p


def joined(folder: Path) -> dict[str, Tensor]:
    """A state dict that was cut into part*.pt; `name#i` are the pieces of a large tensor."""
    pieces: dict[str, Tensor] = {}
    for file in sorted(folder.glob("part*.pt")):
        pieces |= torch.load(file, map_location="cpu", weights_only=True)
    state = {k: v for k, v in pieces.items() if "#" not in k}
    for name in {k.split("#")[0] for k in pieces if "#" in k}:
        state[name] = torch.cat(
            [pieces[k] for k in sorted(k for k in pieces if k.startswith(f"{name}#"))]
        )
    shapes = {k: v.shape for k, v in m.build().state_dict().items()}
    return {k: v.view(shapes[k]) for k, v in state.items()}


class Trainer:
    """One training run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        # Forked before torch and the tokenizer start threads of their own.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.pool = multiprocessing.get_context("fork").Pool(args.workers)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cuda.matmul.allow_tf32 = True
        self.start = time.monotonic()
        counts = np.bincount(
            rows_of(TOKENIZER, random.Random("counts"), 64, SHORT_ROW)[0].ravel(),
            minlength=m.CONFIG["vocab_size"],
        )
        self.net = m.build(args.seed, torch.from_numpy(counts)).to(self.device)
        self.optimiser = Optimiser(self.net, args.relative, args.adam)
        self.step = 0
        self.turns = {n: m.angles(self.net, n) for n in (SHORT_ROW, LONG_ROW)}
        self.log: list[dict[str, float]] = []
        self.sums: dict[str, Tensor] = {}
        if args.init:
            self.net.load_state_dict(joined(args.init))
            self.step = args.at
        self.first = self.step
        if args.resume:
            state = torch.load(args.work / "state.pt", map_location=self.device, weights_only=False)
            self.net.load_state_dict(state["net"])
            self.optimiser.load(state["optimiser"])
            self.step, self.log = state["step"], state["log"]

    def save(self) -> None:
        self.args.work.mkdir(parents=True, exist_ok=True)
        state = {
            "net": self.net.state_dict(),
            "optimiser": self.optimiser.state(),
            "step": self.step,
            "log": self.log,
        }
        torch.save(state, self.args.work / "state.tmp")
        os.replace(self.args.work / "state.tmp", self.args.work / "state.pt")
        torch.save(
            {k: v.cpu() for k, v in self.net.state_dict().items()}, self.args.work / "weights.pt"
        )

    def one_step(self, ids: Tensor, weight: Tensor, doc: Tensor) -> dict[str, Tensor]:
        args = self.args
        progress = args.force_progress if args.force_progress >= 0 else self.step / args.steps
        rounded = progress >= ROUND_FROM
        options = m.Options(
            fp8_cache=rounded,
            select=progress >= SELECT_FROM,
            align=m.align_positions(weight),
            compiled=not args.no_compile,
        )
        w = m.working_weights(self.net, rounded, compiled=options.compiled)
        hidden, extras = m.forward(w, self.turns[ids.shape[1]], ids, doc, options)
        target, count = ids.roll(-1, 1).flatten(), weight.roll(-1, 1).clone()
        count[:, -1] = 0
        count = count.flatten()
        pieces = m.compiled_pieces() if options.compiled else m.PIECES
        loss, each = pieces["weighted_loss"](F.linear(hidden, w["lm_head.weight"]), target, count)
        assert extras.align_loss is not None
        (loss + 0.2 * extras.align_loss).backward()
        fresh = min(1.0, (self.step - self.first + 1) / 60)  # momenta start empty
        self.optimiser.step(lr_scale(progress) * fresh, progress)
        self._balance(extras.load, progress)
        own = (count > 0.5).float()
        kind = "long" if ids.shape[1] == LONG_ROW else "short"
        out = {
            f"answer_{kind}": (each * own).sum() / own.sum(),
            f"loss_{kind}": loss.detach(),
            "align": extras.align_loss.detach(),
        }
        if kind == "long":
            deep = own * (torch.arange(LONG_ROW, device=ids.device) > 2048).float().repeat(len(ids))
            out["answer_deep"] = (each * deep).sum() / deep.sum().clamp(min=1)
            if extras.recall:
                out["recall"] = torch.stack(extras.recall).mean()
        loads = torch.stack([extras.load[i].float() for i in range(1, m.LAYERS)])
        out["worst_load"] = (loads / loads.mean(1, keepdim=True)).max()
        return out

    @torch.no_grad()
    def _balance(self, load: dict[int, Tensor], progress: float) -> None:
        """Loss-free balancing: overloaded experts lose, idle ones gain a little selection bias."""
        for i, counts in load.items():
            if i:
                gate = self.net.model.layers[i].mlp.gate
                gate.e_score_correction_bias -= (
                    0.002 * lr_scale(progress) * torch.sign(counts - counts.float().mean())
                )

    def note(self, values: dict[str, Tensor]) -> None:
        for k, v in values.items():
            s = self.sums.setdefault(k, torch.zeros(2, device=self.device))
            s += torch.stack([v.float(), torch.ones((), device=self.device)])

    def flush(self, rate: float) -> None:
        row = {
            "step": float(self.step),
            "tokens": float(self.step * self.args.tokens),
            "seconds": time.monotonic() - self.start,
            "tokens_per_s": rate,
        }
        row |= {k: float(v[0] / v[1]) for k, v in self.sums.items()}
        self.sums = {}
        self.log.append(row)
        print(" ".join(f"{k}={v:.4g}" for k, v in row.items()), flush=True)

    def run(self) -> None:
        args = self.args
        stop = args.stop or args.steps
        batches = Batches(
            self.pool, args.seed, self.step, args.steps, args.tokens, args.workers, self.device
        )
        began, since = time.monotonic(), self.step
        every = max(1, min(100, args.steps // 40))
        while self.step < stop and time.monotonic() - self.start < args.seconds:
            step, tensors = batches.next()
            assert step == self.step
            self.note(self.one_step(*tensors))
            self.step += 1
            if self.step % every == 0 or self.step < 4:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                now = time.monotonic()
                self.flush((self.step - since) * args.tokens / (now - began))
                began, since = now, self.step
        self.pool.terminate()
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        self.save()

    def profile(self) -> None:
        """Seconds a step of every kind takes once warm."""
        from torch.profiler import ProfilerActivity, profile

        keep = self.args.force_progress
        for progress in (0.4, 0.9):
            for length in (SHORT_ROW, LONG_ROW):
                self.args.force_progress = progress
                made = rows_of(TOKENIZER, random.Random(0), self.args.tokens // length, length)
                batch = [
                    torch.from_numpy(a.astype(t)).to(self.device)
                    for a, t in zip(made, (np.int64, np.float32, np.int32), strict=True)
                ]
                first = time.monotonic()
                self.one_step(*batch)
                torch.cuda.synchronize()
                start = time.monotonic()
                for _ in range(3):
                    self.one_step(*batch)
                torch.cuda.synchronize()
                took = (time.monotonic() - start) / 3
                print(
                    f"progress {progress} length {length}: first {start - first:.1f} s, then "
                    f"{took * 1e3:.0f} ms, {self.args.tokens / took:,.0f} tokens/s, "
                    f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB",
                    flush=True,
                )
                if (progress, length) in ((0.4, SHORT_ROW), (0.9, LONG_ROW)):
                    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                        self.one_step(*batch)
                        torch.cuda.synchronize()
                    print(
                        seen.key_averages().table(
                            sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=60
                        )[:5200],
                        flush=True,
                    )
        self.args.force_progress = keep


def export_all(trainer: Trainer, out: Path) -> None:
    """Dialect B into `out` (shards and index only), calibration and clamp share beside it."""
    made = [
        rows_of(TOKENIZER, random.Random(f"calibration-{n}"), rows, n)
        for n, rows in ((SHORT_ROW, 64), (LONG_ROW, 8))
    ]
    amax: dict[str, float] = {}
    report: dict[str, Any] = {}
    for ids, _, doc in made:
        seen, share = export.calibrate(
            trainer.net,
            torch.from_numpy(ids.astype(np.int64)).to(trainer.device),
            torch.from_numpy(doc.astype(np.int32)).to(trainer.device),
        )
        amax = {k: max(v, amax.get(k, 0.0)) for k, v in seen.items()}
        report[f"clamped_rows_of_{ids.shape[1]}"] = share
    state = export.model_state(trainer.net)
    export.write_shards(export.nvfp4_tensors(state, amax), out, export.SHARD_BYTES)
    (out / "report.json").write_text(
        json.dumps(report | {"step": trainer.step, "amax": amax}, indent=1) + "\n"
    )
    print("clamped", json.dumps(report), flush=True)


def judged_items(which: str) -> list[battery.Item]:
    """All questions, or every third."""
    items = [i for i in battery.load() if i["check"] != "story"]
    return items if which == "all" else items[::3]


def main() -> None:
    args = parser().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    if args.profile:
        trainer.profile()
    trainer.run()
    with open(args.out / "training.csv", "w", newline="") as f:
        fields = list(dict.fromkeys(k for row in trainer.log for k in row))
        writer = csv.DictWriter(f, fields)
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" for k, v in row.items()} for row in trainer.log)
    trainer.net.eval()
    if args.export:
        export_all(trainer, args.out)
    if args.judge != "none":
        items = judged_items(args.judge)
        for rounded in (False, True):
            text, _, wrong = judge(trainer.net, items, rounded)
            name = "nvfp4" if rounded else "bf16"
            (args.out / f"battery_{name}.txt").write_text(text + "\n" + "\n".join(wrong) + "\n")
            print(
                f"--- battery, {name}, step {trainer.step}, "
                f"{time.monotonic() - trainer.start:.0f} s\n{text}"
            )
            print("\n".join(wrong[:12]), flush=True)


if __name__ == "__main__":
    main()
