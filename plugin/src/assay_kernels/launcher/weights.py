"""Brings one pinned revision of a checkpoint into a folder, once.

    python -m assay_kernels.launcher.weights REPOSITORY REVISION FOLDER

A complete folder is left alone and nothing is asked of any network, so that a node can be cut off
from it afterwards. An interrupted download goes on where it stopped. What came is compared with the
hub's SHA-256 of every large file, then the headers are audited. Exit code 0: complete; 1: could not
be completed, run it again; 2: can never be, as asked.

HF_ENDPOINT, HTTPS_PROXY, REQUESTS_CA_BUNDLE / SSL_CERT_FILE, as huggingface_hub takes them;
ASSAY_OFFLINE=1 forbids any request; a token is read from $ASSAY_SECRETS_DIR/hf_token.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STAMP = "assay-download.json"
CHUNK = 2**24


class WeightsError(Exception):
    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def is_complete(folder: Path, repository: str, revision: str) -> bool:
    """Whether the folder holds this revision, each file as large as it was when it was verified.
    Raises WeightsError when it holds another."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise WeightsError(f"{folder / STAMP} cannot be read: {error}", 2) from error
    if (stamp["repository"], stamp["revision"]) != (repository, revision):
        raise WeightsError(
            f"{folder} holds {stamp['repository']} at {stamp['revision']}, not {repository} at"
            f" {revision}: give that its own folder (MODEL_DIR), so that a rollback finds both",
            2,
        )
    for name, size in stamp["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise WeightsError(
                f"{path} is not the {size} bytes that were verified: remove {folder / STAMP} to"
                " have the folder completed again"
            )
    return True


def fetch(repository: str, revision: str, folder: Path, token: str | None) -> None:
    """Download, verify, audit, and only then say that it is complete."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi(token=token).model_info(repository, revision=revision, files_metadata=True)
        snapshot_download(repository, revision=revision, local_dir=folder, token=token)
    except Exception as error:  # the hub's own errors, and any of the network's
        first = str(error).strip().splitlines()[0]
        raise WeightsError(
            f"{repository} at {revision} could not be fetched: {type(error).__name__}: {first}"
        ) from error
    files = {file.rfilename: file for file in info.siblings or []}
    expected = {name: file.lfs.sha256 for name, file in files.items() if file.lfs is not None}
    with ThreadPoolExecutor() as pool:
        found = dict(zip(expected, pool.map(lambda n: sha256(folder / n), expected), strict=True))
    for name, value in expected.items():
        if found[name] != value:
            (folder / name).unlink()
            raise WeightsError(f"{folder / name} came damaged and was removed: run it again")
    audit_headers(folder)
    sizes = {name: (folder / name).stat().st_size for name in files}
    stamp = {"repository": repository, "revision": revision, "files": sizes}
    partial = folder / f"{STAMP}.partial"
    partial.write_text(json.dumps(stamp, indent=1) + "\n")
    partial.replace(folder / STAMP)
    print(f"{folder}: {len(files)} files of {repository} at {revision}, verified", flush=True)


def sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def audit_headers(folder: Path) -> None:
    from assay_kernels.audit import Severity, audit
    from assay_kernels.checkpoint import CheckpointError

    try:
        faults = [f for f in audit(folder).findings if f.severity is Severity.FAULT]
    except CheckpointError as error:
        raise WeightsError(f"{folder}: {error}", 2) from error
    if faults:
        raise WeightsError(f"{folder} would turn to garbage: {faults[0]}", 2)


def token(variables: Mapping[str, str]) -> str | None:
    """From a file: a token in the environment is shown by `docker inspect`."""
    path = Path(variables.get("ASSAY_SECRETS_DIR") or "/run/secrets", "hf_token")
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightsError(f"secret {path} cannot be read: {error.strerror}", 2) from error


def main() -> int:
    if len(sys.argv) != 4:
        print("assay: usage: weights REPOSITORY REVISION FOLDER", file=sys.stderr)
        return 2
    repository, revision, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    try:
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            raise WeightsError(
                f"MODEL_REVISION={revision!r}: must be a commit of 40 hexadecimal digits; a branch"
                " may be other weights tomorrow", 2,
            )  # fmt: skip
        if is_complete(folder, repository, revision):
            print(f"{folder}: {repository} at {revision} is complete", flush=True)
            return 0
        if os.environ.get("ASSAY_OFFLINE") == "1":
            raise WeightsError(
                f"{folder} is not complete and ASSAY_OFFLINE=1: unpack the bundle there", 2
            )
        fetch(repository, revision, folder, token(os.environ))
    except WeightsError as error:
        print(f"assay: {error}", file=sys.stderr, flush=True)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
