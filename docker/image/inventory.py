"""What an image is made of: a software bill of materials and a licence list, made by its build.

    python inventory.py FOLDER

Writes FOLDER/sbom.cdx.json (CycloneDX 1.6: Python distributions and Debian packages, with versions,
package URLs and licences) and FOLDER/licences.txt, and ends with 1 when a distribution names no
licence at all. Standard library only: it runs in every image.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, order=True)
class Component:
    name: str
    version: str
    purl: str
    licence: str

    def as_cyclonedx(self) -> dict[str, Any]:
        return {
            "type": "library",
            "bom-ref": self.purl,
            "name": self.name,
            "version": self.version,
            "purl": self.purl,
            "licenses": [{"license": {"name": self.licence}}],
        }


def licence(distribution: Distribution) -> str:
    """As the distribution's metadata says it: expression, classifier, or the short licence
    field; else the names of the licence files that it brings."""
    data = distribution.metadata
    if expression := data.get("License-Expression"):
        return str(expression)
    classifiers = [
        value.rpartition(" :: ")[2]
        for value in data.get_all("Classifier") or []
        if value.startswith("License :: ") and not value.endswith("OSI Approved")
    ]
    if classifiers:
        return " / ".join(classifiers)
    text = str(data.get("License") or "").strip()
    if text and text.upper() != UNKNOWN:
        return text.splitlines()[0][:80]
    files = [
        str(file).rpartition("/")[2]
        for file in distribution.files or []
        if re.search(r"(licen[cs]e|copying|eula)", str(file), re.IGNORECASE)
        and ".dist-info" in str(file)
    ]
    return f"see {', '.join(sorted(set(files)))}" if files else UNKNOWN


def python_packages() -> Iterator[Component]:
    seen = set()
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name in seen:
            continue
        seen.add(name)
        purl = f"pkg:pypi/{name}@{distribution.version}"
        yield Component(name, distribution.version, purl, licence(distribution))


def debian_packages() -> Iterator[Component]:
    release = dict(
        line.split("=", 1)
        for line in Path("/etc/os-release").read_text().splitlines()
        if "=" in line
    )
    distro = release.get("ID", "debian").strip('"')
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\n"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for line in listed.splitlines():
        name, version, architecture = line.split()
        purl = f"pkg:deb/{distro}/{name}@{version}?arch={architecture}"
        yield Component(name, version, purl, debian_licence(name))


def debian_licence(package: str) -> str:
    """Names in a machine-readable copyright file; else the file to read."""
    path = Path("/usr/share/doc", package, "copyright")
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return f"see {path} of the package"
    names = sorted(set(re.findall(r"^License: (\S.*)$", text, re.MULTILINE)))
    return " / ".join(names)[:200] if names else f"see {path}"


def sbom(components: list[Component]) -> dict[str, Any]:
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [component.as_cyclonedx() for component in components],
    }


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    components = sorted([*python_packages(), *debian_packages()])
    (folder / "sbom.cdx.json").write_text(json.dumps(sbom(components), indent=1) + "\n")
    width = max(len(f"{c.name} {c.version}") for c in components)
    lines = [f"{f'{c.name} {c.version}':<{width}}  {c.licence}" for c in components]
    (folder / "licences.txt").write_text("\n".join(lines) + "\n")
    unknown = [component.name for component in components if component.licence == UNKNOWN]
    print(f"inventory: {len(components)} components, {len(unknown)} without a licence: {unknown}")
    return 1 if set(unknown) - KNOWN_SILENT else 0


KNOWN_SILENT = frozenset({"cuda-toolkit"})
"""Distributions whose metadata says nothing. cuda-toolkit holds no file: it only asks for NVIDIA's
others, which name their licence."""


if __name__ == "__main__":
    sys.exit(main())
