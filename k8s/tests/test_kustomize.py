"""k8s/base by real kustomize is what the chart renders."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import BIN, ROOT, render
from manifests import load

sys.path.insert(0, str(ROOT / "k8s/generate"))


def kustomize(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(BIN / "kubectl"), "kustomize", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return load(done.stdout)


def without_helm(node: Any) -> Any:
    if isinstance(node, dict):
        hers = ("helm.sh/chart", "app.kubernetes.io/managed-by")
        return {k: without_helm(v) for k, v in node.items() if k not in hers}
    return [without_helm(v) for v in node] if isinstance(node, list) else node


def by_identity(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(o["kind"], o["metadata"]["name"]): o for o in objects}


def test_the_base_is_the_chart_without_helm() -> None:
    rendered = render(ci="base", release="assay", namespace="default", hooks=False)
    assert by_identity(kustomize(ROOT / "k8s/base")) == by_identity(
        [without_helm(o) for o in rendered]
    )


def test_an_overlay_can_change_namespace_image_and_revision(tmp_path: Path) -> None:
    overlay = tmp_path / "site"
    overlay.mkdir()
    base = Path("../" * len(tmp_path.parts)) / str(ROOT / "k8s/base").lstrip("/")
    overlay.joinpath("kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [str(base)],
                "namespace": "llm",
                "images": [
                    {
                        "name": "assay-server",
                        "newName": "mirror.example.com/assay-server",
                        "newTag": "7",
                    }
                ],
            }
        )
    )
    objects = kustomize(overlay)
    assert {o["metadata"]["namespace"] for o in objects} == {"llm"}
    (deployment,) = [o for o in objects if o["kind"] == "Deployment"]
    images = [c["image"] for c in deployment["spec"]["template"]["spec"]["containers"]]
    assert images == ["mirror.example.com/assay-server:7", "assay-gate:0.1.0"]


@pytest.mark.parametrize("name", ["kustomization.yaml"])
def test_every_file_of_the_base_is_in_it(name: str) -> None:
    listed = yaml.safe_load((ROOT / "k8s/base" / name).read_text())["resources"]
    assert sorted(listed) == sorted(p.name for p in (ROOT / "k8s/base").iterdir() if p.name != name)
