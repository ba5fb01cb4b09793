"""templates/configmap-dashboards.yaml"""

import json

from chart import CHART, of, one, render


def test_dashboards_arrive_as_they_are() -> None:
    objects = render()
    for name in ("operator", "release"):
        found = one(objects, "ConfigMap", f"-dashboard-{name}")
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        there = json.loads(found["data"][f"assay-{name}.json"])
        assert there == json.loads((CHART / f"dashboards/{name}.json").read_text())
    off = render({"monitoring": {"dashboards": False}})
    assert [o for o in of(off, "ConfigMap") if "dashboard" in o["metadata"]["name"]] == []
