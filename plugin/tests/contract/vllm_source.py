"""Sources of the vLLM versions that the plugin is written for, without installing or importing
them.

0.32.0 is the CPU build that is installed anyway. 0.33.0 is read from its source archive (47 MB; the
wheel is seven times that) on whatever index pip is configured for, checked against the sha256 below
and kept as `.cache/vllm-0.33.0/`.
"""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlparse

import requests

from assay_kernels.vllm_plugin.hooks import CPU_VERSION, GPU_VERSION

ARCHIVE = f"vllm-{GPU_VERSION}.tar.gz"
ARCHIVE_SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
CACHE = Path(__file__).resolve().parents[3] / ".cache"
TIMEOUT_S = 30.0


class UnavailableError(Exception):
    """These sources cannot be had here; the message says what was tried."""


def package_folder(version: str) -> Path:
    """The `vllm` package folder of `version`; raises UnavailableError."""
    return _installed() if version == CPU_VERSION else _downloaded()


def _installed() -> Path:
    spec = importlib.util.find_spec("vllm")  # finds, does not import
    if spec is None or spec.origin is None:
        raise UnavailableError("vllm is not installed")
    package = Path(spec.origin).parent
    release = (package / "_version.py").read_text()
    if CPU_VERSION not in release:
        raise UnavailableError(f"the installed vllm is not {CPU_VERSION}")
    return package


def _downloaded() -> Path:
    target = CACHE / f"vllm-{GPU_VERSION}"
    if target.is_dir():
        return target / "vllm"
    tried: list[str] = []
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        archive = Path(scratch, ARCHIVE)
        for url in _candidates(tried):
            try:
                _fetch(url, archive)
            except (OSError, requests.RequestException, UnavailableError) as error:
                tried.append(f"{_shown(url)}: {error}")
                continue
            with tarfile.open(archive) as tar:
                wanted = [
                    m for m in tar if m.isfile() and m.name.endswith(".py") and "/vllm/" in m.name
                ]
                tar.extractall(scratch, members=wanted, filter="data")
            Path(scratch, f"vllm-{GPU_VERSION}").rename(target)  # whole or not at all
            return target / "vllm"
    raise UnavailableError(
        f"no {ARCHIVE} to be had: " + "; ".join(tried or ["no index configured"])
    )


def _fetch(url: str, path: Path) -> None:
    found = hashlib.sha256()
    if urlparse(url).scheme == "file":
        data = Path(urlparse(url).path).read_bytes()
        found.update(data)
        path.write_bytes(data)
    else:
        with requests.get(url, stream=True, timeout=TIMEOUT_S, verify=_certificates()) as answer:
            answer.raise_for_status()
            with path.open("wb") as out:
                for piece in answer.iter_content(1 << 20):
                    found.update(piece)
                    out.write(piece)
    if found.hexdigest() != ARCHIVE_SHA256:
        raise UnavailableError(f"sha256 is {found.hexdigest()}, not {ARCHIVE_SHA256}")


def pip_setting(name: str) -> str:
    """pip's own value of an option, from the environment or any of its configuration files; empty
    when unset."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    values = dict(re.findall(r"^([\w.:-]+)='(.*)'$", listed, re.MULTILINE))
    # The order in which pip itself lets one override the other.
    for section in (":env:", "install", "global"):
        value = values.get(f"{section}.{name}")
        if value is not None:
            return value.replace("\\n", " ").strip()
    return ""


def _certificates() -> str | bool:
    return pip_setting("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or True


def _candidates(tried: list[str]) -> Iterator[str]:
    """URLs of the archive: pip's --find-links folders, then its indexes; what does not answer is
    noted in `tried`."""
    for folder in pip_setting("find-links").split():
        path = Path(urlparse(folder).path, ARCHIVE)
        if path.is_file():
            yield path.as_uri()
    if pip_setting("no-index").lower() in ("1", "true", "yes", "on"):
        tried.append("pip is configured with no-index")
        return
    index = pip_setting("index-url") or "https://pypi.org/simple"
    for base in (index, *pip_setting("extra-index-url").split()):
        page = base.rstrip("/") + "/vllm/"
        try:
            found = archive_url(page, *_page(page))
        except (OSError, requests.RequestException, ValueError) as error:
            tried.append(f"{_shown(page)}: {error}")
            continue
        if found:
            yield found
        else:
            tried.append(f"{_shown(page)}: does not list {ARCHIVE}")


def _page(url: str) -> tuple[str, str]:
    """(content type, text) of a project page of a simple index, PEP 503 or PEP 691."""
    if urlparse(url).scheme == "file":
        return "text/html", Path(urlparse(url).path, "index.html").read_text()
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    answer = requests.get(
        url, headers={"Accept": accept}, timeout=TIMEOUT_S, verify=_certificates()
    )
    answer.raise_for_status()
    return answer.headers.get("Content-Type", ""), answer.text


def archive_url(page: str, content_type: str, text: str) -> str | None:
    """URL of the archive on a project page of a simple index, None when it is not listed."""
    if "json" in content_type:
        links = [f["url"] for f in json.loads(text)["files"]]
    else:
        links = [unescape(link) for link in re.findall(r"""<a\s[^>]*?href=["']([^"']+)""", text)]
    for link in links:
        if urlparse(link).path.rsplit("/", 1)[-1] == ARCHIVE:
            return urldefrag(urljoin(page, link)).url
    return None


def _shown(url: str) -> str:
    """URL without the credentials that a private index may carry."""
    return re.sub(r"//[^/@]*@", "//", url)
