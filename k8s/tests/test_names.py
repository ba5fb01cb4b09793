"""Names and labels: long releases, two releases in one namespace, selectors that never meet."""

import itertools
import re
from typing import Any

import pytest
from chart import CI, of, one, pods, render

LONG = "a" * 53  # helm's own bound
ALIKE = ("x" * 52 + "1", "x" * 52 + "2")


def identity(o: dict[str, Any]) -> tuple[str, str]:
    return o["kind"], o["metadata"]["name"]


@pytest.mark.parametrize("ci", CI)
@pytest.mark.parametrize("release", ["a", "assay", LONG, "dashes-" * 7 + "ends"])
def test_names_and_labels_stay_valid(ci: str, release: str) -> None:
    for o in render(ci=ci, release=release):
        name = o["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name), name
        assert len(name) <= 63, name
        for labels in [o["metadata"].get("labels", {}), *(m["labels"] for _, m, _ in pods([o]))]:
            for key, value in labels.items():
                assert len(value) <= 63, (key, value)
                assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value), (
                    key,
                    value,
                )


def test_what_controllers_add_still_fits() -> None:
    """A LeaderWorkerSet's pod is NAME-REPLICA-WORKER, its sets' revision NAME-REPLICA-HASH, and
    both are labels or host names of 63 characters. A Deployment's pods are cut by the API server,
    a Job's too."""
    (group,) = of(render(ci="two-nodes", release=LONG), "LeaderWorkerSet")
    assert len(group["metadata"]["name"]) + len("-99-0123456789") <= 63


@pytest.mark.parametrize(
    ("one_name", "other"), [ALIKE, ("a", "b"), ("assay", "assay-2"), ("a", "a-assay")]
)
def test_two_releases_in_one_namespace_share_nothing(one_name: str, other: str) -> None:
    for ci in ("b200x8", "blue-green", "everything"):
        first, second = ({identity(o) for o in render(ci=ci, release=r)} for r in (one_name, other))
        if (one_name, other) == ("a", "a-assay"):
            # The one pair that would meet: helm refuses the second, because the first owns the
            # objects.
            assert first == second
            continue
        assert not first & second


def selectors(objects: list[dict[str, Any]]) -> list[tuple[str, dict[str, str]]]:
    found = []
    for o in objects:
        spec = o.get("spec", {})
        for key in ("selector", "podSelector"):
            labels = spec.get(key) or {}
            labels = labels.get("matchLabels", labels if o["kind"] == "Service" else {})
            if labels:
                found.append((f"{o['kind']}/{o['metadata']['name']}", labels))
    return found


def test_no_selector_catches_another_release_s_pods() -> None:
    for ci in ("b200x8", "blue-green", "everything", "two-nodes"):
        first, second = (render(ci=ci, release=r) for r in ALIKE)
        for (name, labels), (_, metadata, _) in itertools.product(selectors(first), pods(second)):
            assert not labels.items() <= metadata["labels"].items(), name


def test_every_selector_of_servers_catches_exactly_the_servers() -> None:
    for ci in ("b200x8", "two-nodes"):
        objects = render(ci=ci)
        labels = one(objects, "Service")["spec"]["selector"]
        caught = [n for n, m, _ in pods(objects) if labels.items() <= m["labels"].items()]
        assert caught in (
            ["Deployment/r-assay-server"],
            ["LeaderWorkerSet/r-assay-server.leaderTemplate"],
        )


def test_what_is_referred_to_is_rendered() -> None:
    """Config maps, claims and accounts of the chart's own, by name."""
    for ci in CI:
        objects = render(ci=ci, release=LONG)
        base = one(objects, "Service", "-api")["metadata"]["name"].removesuffix("-api")
        there = {identity(o) for o in objects}
        for _, _, spec in pods(objects):
            assert ("ServiceAccount", spec["serviceAccountName"]) in there
            for volume in spec["volumes"]:
                for kind, key in (("ConfigMap", "name"), ("PersistentVolumeClaim", "claimName")):
                    source = volume.get(kind[0].lower() + kind[1:], {})
                    if source.get(key, "").startswith(base):
                        assert (kind, source[key]) in there, source


def test_a_selector_does_not_change_when_values_do() -> None:
    """Deployments refuse another selector for ever."""
    before = one(render(), "Deployment")["spec"]["selector"]
    values = {
        "images": {"server": {"tag": "9"}},
        "profile": {"name": "b200x8-dep"},
        "model": {"revision": "f" * 40},
    }
    assert one(render(values), "Deployment")["spec"]["selector"] == before


def test_registry_prefix_and_digest_make_the_reference() -> None:
    def images(values: dict[str, Any], ci: str = "b200x8") -> set[str]:
        return {
            c["image"] for _, _, spec in pods(render(values, ci=ci)) for c in spec["containers"]
        }

    assert images({"imageRegistry": "mirror:5000/a"}) == {
        "mirror:5000/a/assay-server:0.1.0",
        "mirror:5000/a/assay-gate:0.1.0",
    }
    own = {
        "images": {"server": {"repository": "ghcr.io/x/server", "tag": "1"}},
        "imageRegistry": "mirror",
    }
    assert images(own) == {"ghcr.io/x/server:1", "mirror/assay-gate:0.1.0"}
    digest = "sha256:" + "a" * 64
    assert f"assay-server@{digest}" in images(
        {"images": {"server": {"digest": digest, "tag": "latest"}}}
    )
    assert images({"images": {"server": {"digest": digest}}}, "blue-green") == {
        "assay-server:0.1.0", "assay-server:0.2.0", "assay-gate:0.1.0"
    }  # fmt: skip
