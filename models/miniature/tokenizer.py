"""Train the byte-level BPE tokenizer (4,096 entries) with V4's special tokens; a digit is always a
token of its own.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import world
from .chat import BOS, EOS, HIDDEN_TOKENS, PAD, VISIBLE_TOKENS, segments
from .generate import LONG_MIX, SHORT_MIX, draw

VOCABULARY = 4096


def corpus(seed: int, samples: int) -> list[str]:
    """Training text for the merges, special tokens cut out, with every known word at least thrice
    in both positions.
    """
    rng = random.Random(f"tokenizer-{seed}")
    specials = HIDDEN_TOKENS + VISIBLE_TOKENS
    texts = []
    for i in range(samples):
        for text, _ in segments(draw(rng, LONG_MIX if i % 200 == 0 else SHORT_MIX).chat):
            for special in specials:
                text = text.replace(special, "\n")
            texts.append(text)
    words = {w for value in vars(world).values() if isinstance(value, list) for w in value}
    for table in vars(world).values():
        if isinstance(table, dict) and not str(table).startswith("{'__"):
            words |= {str(w) for pair in table.items() for w in pair}
    for word in sorted(w for w in words if isinstance(w, str) and w.isascii()):
        texts += [f"{word} {word}"] * 30
    return texts


def train(seed: int = 1, samples: int = 60_000) -> Tokenizer:
    """The tokenizer; same seed, same file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, special=True, normalized=False) for t in HIDDEN_TOKENS]
    specials += [AddedToken(t, special=False, normalized=False) for t in VISIBLE_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, samples), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def _keep_visible(file: Path) -> None:
    """Trainers mark every given token as special; those that parsers read must not be skipped."""
    saved = json.loads(file.read_text())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] in HIDDEN_TOKENS
    file.write_text(json.dumps(saved, ensure_ascii=False, indent=2))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and its two companions."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _keep_visible(folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    )
    generation = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "do_sample": True,
        "temperature": 1.0,
    }
    generation["top_p"] = 1.0
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


if __name__ == "__main__":
    save(train(), Path(sys.argv[1]))
