"""Draw `training.png` from `training.csv`. usage: python -m miniature.plot"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
CURVES = {
    "answer_short": "answers, rows of 1,024",
    "answer_deep": "answers beyond 2,048 tokens",
    "loss_short": "weighted loss, rows of 1,024",
    "align": "indexer: KL to the attention",
}


def main() -> None:
    with open(FOLDER / "training.csv") as f:
        rows = list(csv.DictReader(f))
    figure, axis = plt.subplots(figsize=(9, 5))
    for key, label in CURVES.items():
        points = [(float(r["step"]), float(r[key])) for r in rows if r.get(key)]
        axis.plot(*zip(*points, strict=True), label=label)
    for step, text in ((5490, "wordings widened, NVFP4 in the forward pass"),):
        axis.axvline(step, color="grey", linestyle=":")
        axis.text(step, 5, f" {text}", fontsize=8)
    axis.set(xlabel="step of 65,536 tokens", ylabel="nats", yscale="log", title="The miniature V4")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(FOLDER / "training.png", dpi=90)


if __name__ == "__main__":
    main()
