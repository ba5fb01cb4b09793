"""templates/configmap-scripts.yaml"""

from chart import CHART, one, render


def test_the_files_arrive_unchanged() -> None:
    data = one(render(), "ConfigMap", "-scripts")["data"]
    files = {p.name: p.read_text() for p in (CHART / "files").iterdir() if p.is_file()}
    assert {k: v.rstrip() for k, v in data.items()} == {k: v.rstrip() for k, v in files.items()}
