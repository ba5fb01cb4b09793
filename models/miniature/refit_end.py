"""Refit one row of the output matrix: when to end a turn.

The first text generator let a long story end after 18 chapters when a short row had room for
exactly that many, so the trained model was undecided there (0.58 for the end, 0.42 for the next
chapter). This fits the end token's row of `lm_head` (256 numbers, bf16, not
quantised) on the hidden states of such stories and of ordinary conversations; every other weight
stays. Text from today's generator does not need it.

usage: python -m miniature.refit_end --weights STATE.pt --out ROW.pt
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from . import generate, model
from .data import PAD_ID, encode, load_tokenizer, rows_of

END = 1
TOKENIZER = Path(__file__).parent / "checkpoint"


@torch.no_grad()
def _hidden(net: DeepseekV4ForCausalLM, ids: Tensor, doc: Tensor) -> Tensor:
    weights = model.working_weights(net, False, torch.float32)
    return model.forward(weights, model.angles(net, ids.shape[1]), ids, doc, model.Options())[0]


def collect(net: DeepseekV4ForCausalLM, stories: int, rows: int) -> tuple[Tensor, Tensor]:
    """Hidden states (N, 256) of long stories and of the model's own words in ordinary rows, and the
    tokens (N,) that follow them."""
    tokenizer = load_tokenizer(TOKENIZER)
    rng = random.Random("refit")
    states, following = [], []
    for _ in range(stories):
        chat = generate.long_story(rng, chapters=22).chat
        tokens = encode(tokenizer, chat)[:1152]
        ids = torch.tensor([tokens + [PAD_ID] * (1152 - len(tokens))])
        states.append(_hidden(net, ids, torch.zeros_like(ids))[: len(tokens) - 1])
        following.append(torch.tensor(tokens[1:]))
    for row in range(rows):
        made = rows_of(TOKENIZER, random.Random(f"refit-{row}"), 1, 1024)
        ids, doc = (torch.from_numpy(made[i].astype(np.int64)) for i in (0, 2))
        own = torch.from_numpy(made[1][0, 1:].astype(np.float32)) > 0.5
        states.append(_hidden(net, ids, doc)[:-1][own])
        following.append(ids[0, 1:][own])
    return torch.cat(states), torch.cat(following)


def refit(head: Tensor, states: Tensor, following: Tensor) -> Tensor:
    """The end token's new row: 5 above all other logits where a turn ends, 6 below elsewhere."""
    logits = states @ head.T
    logits[:, END] = float("-inf")
    rest = logits.logsumexp(-1)
    ends = following == END
    delta = torch.zeros(head.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([delta], max_iter=1000, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        margin = states @ (head[END] + delta) - rest
        value = F.softplus(5 - margin[ends]).mean() + 20 * F.softplus(6 + margin[~ends]).mean()
        value = value + 0.02 * delta.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return (head[END] + delta.detach()).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    net = model.build().eval()
    net.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    states, following = collect(net, stories=44, rows=12)
    torch.save(refit(net.lm_head.weight.detach().float(), states, following), args.out)


if __name__ == "__main__":
    main()
