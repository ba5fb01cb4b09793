"""What is generated is up to date, and the generator tells when it is not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from chart import BIN, ROOT


def check(k8s: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", str(k8s / "generate"), "--check"],
        capture_output=True, text=True, env=os.environ | {"HELM": str(BIN / "helm4")},
    )  # fmt: skip


def test_everything_is_up_to_date() -> None:
    done = check(ROOT / "k8s")
    assert done.returncode == 0, done.stderr


def test_a_changed_chart_makes_its_files_stale(tmp_path: Path) -> None:
    copy = tmp_path / "k8s"
    shutil.copytree(ROOT / "k8s", copy, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    values = copy / "chart/values.yaml"
    values.write_text(values.read_text().replace("failAfter: 3", "failAfter: 4"))
    (copy / "base/stray.yaml").write_text("kind: Stray\n")
    done = check(copy)
    assert done.returncode == 1
    stale = {line.split()[0] for line in done.stderr.splitlines()}
    assert stale == {"k8s/README.md", "k8s/base/deployment-server.yaml", "k8s/base/stray.yaml"}
