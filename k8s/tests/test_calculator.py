"""The calculator against values computed by hand (each step stands there)."""

import json
import subprocess
import sys

import pytest
from chart import ROOT

sys.path.insert(0, str(ROOT / "k8s"))
import calculator
from calculator import FLASH, PRO


def test_routed_experts_of_pro() -> None:
    # 7168 x 3072 = 22,020,096 weights a matrix; 3 matrices; 384 experts; 61 layers; 9/16 byte each.
    # 22,020,096 x 70,272 = 1,547,396,186,112 weights; x 9 / 16 = 870,410,354,688 bytes.
    assert calculator.expert_bytes(PRO) == 870_410_354_688


def test_pro_comes_near_what_its_checkpoint_weighs() -> None:
    # About 913 GB as published, the MTP layer's experts (384 x 3 x 22,020,096 x 9/16 = 14.3 GB)
    # with it.
    total = (
        calculator.expert_bytes(PRO)
        + calculator.replicated_bytes(PRO)
        + 384 * 3 * 22_020_096 * 9 / 16
    )
    assert total == pytest.approx(913e9, rel=0.01)


def test_kv_of_pro() -> None:
    # A block of 256 tokens, ratio 4: 64 states. 64 x 584 = 37,376 -> 65 x 576 = 37,440;
    # the indexer's 64 x 132 = 8,448 -> 15 x 576 = 8,640. Ratio 128: 2 x 584 = 1,168 -> 3 x 576 =
    # 1,728. 30 layers of the one, 31 of the other: 30 x 46,080 + 31 x 1,728 = 1,435,968; / 256 =
    # 5,609.25.
    assert calculator.kv_bytes_per_token(PRO) == 5609.25


def test_kv_of_flash() -> None:
    # 21 x 46,080 + 22 x 1,728 = 1,005,696; / 256 = 3,928.5
    assert calculator.kv_bytes_per_token(FLASH) == 3928.5


def test_a_token_s_experts_sit_on_few_ranks() -> None:
    # 384 experts on 384 ranks: six experts are six ranks. On one rank: one.
    assert calculator.distinct_ranks(PRO, 384) == pytest.approx(6)
    assert calculator.distinct_ranks(PRO, 1) == 1
    # On two ranks of 192: 2 x (1 - C(192,6)/C(384,6)); C(192,6)/C(384,6) =
    # (192x191x190x189x188x187)/(384x383x382x381x380x379) = 0.014999...
    ratio = (192 * 191 * 190 * 189 * 188 * 187) / (384 * 383 * 382 * 381 * 380 * 379)
    assert calculator.distinct_ranks(PRO, 2) == pytest.approx(2 * (1 - ratio))


def test_one_node_and_two() -> None:
    one, two = (calculator.row(PRO, n, 180, 0.9, 8, 64) for n in (1, 2))
    # Experts halve, the rest stays.
    assert (one.weights_gb - two.weights_gb) * 1e9 == pytest.approx(
        calculator.expert_bytes(PRO) / 16
    )
    # 180 x 0.9 - 8 = 154 GB, less the weights.
    assert one.kv_gb == pytest.approx(154 - one.weights_gb)
    # 2 ways x 15 other ranks x 64 tokens x 7168 x 2 bytes x 61 layers = 1,678.9 MB; 8 of 15 on the
    # other node.
    assert (
        two.gather_mb
        == pytest.approx(2 * 15 * 64 * 7168 * 2 * 61 / 1e6)
        == pytest.approx(1678.99, abs=0.1)
    )
    assert two.gather_between_nodes_mb == pytest.approx(two.gather_mb * 8 / 15)
    assert one.gather_between_nodes_mb == 0


def test_what_does_not_fit_or_divide_is_said() -> None:
    row = calculator.row(PRO, 1, 141, 0.95, 8, 64)  # an H200
    assert row.kv_gb < 0
    assert row.kv_tokens == 0
    assert "does not fit" in calculator.table(PRO, [row])
    with pytest.raises(ValueError, match="cannot be spread evenly"):
        calculator.row(PRO, 5, 180, 0.9, 8, 64)


def test_the_command_prints_what_the_readme_shows() -> None:
    readme = (ROOT / "k8s/README.md").read_text()
    for model in ("pro", "flash"):
        done = subprocess.run(
            [sys.executable, str(ROOT / "k8s/calculator.py"), "--model", model],
            capture_output=True,
            text=True,
        )
        assert done.stdout.partition("\n\n")[0] in readme
    done = subprocess.run(
        [sys.executable, str(ROOT / "k8s/calculator.py"), "--json"], capture_output=True, text=True
    )
    assert [r["nodes"] for r in json.loads(done.stdout)] == [1, 2, 4, 8]
