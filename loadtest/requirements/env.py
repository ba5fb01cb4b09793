"""Make .venv-gate from the locks: the two light packages, their tests, no torch and no vLLM.

    make env-gate            # or: python3.11 loadtest/requirements/env.py

A folder of its own because these packages go into an image of their own, and because what Locust
asks for has no business beside vLLM. Standard library only. A second run compares one stamp and
returns. Packages come from the folder named by WHEELHOUSE, if set, or from pip's index; with
PIP_NO_INDEX=1 and a complete WHEELHOUSE nothing is fetched.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-gate"
STAMP = VENV / "assay-env"
LOCKS = (HERE / "gate.lock", HERE / "dev.lock")
PACKAGES = (ROOT / "loadtest", ROOT / "smoke_tests")


def wanted_stamp() -> str:
    """What .venv-gate is made from. Its path counts: a moved one does not work."""
    files = [*LOCKS, Path(__file__), *(package / "pyproject.toml" for package in PACKAGES)]
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return f"{content} {platform.python_version()} {VENV}"


def pip(*arguments: str) -> None:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    answer = subprocess.run([*command, *arguments], text=True, capture_output=True)
    if answer.returncode != 0:
        sys.stderr.write(answer.stderr)
        sys.exit("env-gate: pip failed; its words are above")


def make() -> None:
    if VENV.exists() and not STAMP.exists():
        sys.exit(f"env-gate: {VENV} was not made by `make env-gate`; move it away and try again")
    print("env-gate: making .venv-gate", flush=True)
    started = time.monotonic()
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    STAMP.write_text("unfinished")
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    wheelhouse = os.environ.get("WHEELHOUSE")
    links = ["--find-links", wheelhouse] if wheelhouse else []
    locks = [part for lock in LOCKS for part in ("-r", str(lock))]
    pip("install", "--quiet", "--require-hashes", "--only-binary=:all:", *links, *locks)
    editable = [part for package in PACKAGES for part in ("--editable", str(package))]
    pip("install", "--quiet", "--no-deps", "--no-build-isolation", *editable)
    pip("check")
    STAMP.write_text(wanted_stamp())
    print(f"env-gate: .venv-gate is ready ({time.monotonic() - started:.0f} s)", flush=True)


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"env-gate: Python 3.11 is needed, this is {platform.python_version()}")
    with LOCKS[0].open() as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        if not STAMP.exists() or STAMP.read_text() != wanted_stamp():
            make()


if __name__ == "__main__":
    main()
