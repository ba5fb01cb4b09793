"""templates/analysistemplate-gate.yaml"""

from chart import container, of, one, render


def test_it_runs_the_gate_once_on_the_address_it_is_given() -> None:
    found = one(render(ci="blue-green"), "AnalysisTemplate")["spec"]
    (metric,) = found["metrics"]
    assert (metric["count"], metric["failureLimit"]) == (1, 0)
    spec = metric["provider"]["job"]["spec"]["template"]["spec"]
    assert "--url={{args.url}}" in container(spec, "gate")["args"]
    assert found["args"] == [{"name": "url", "value": "http://r-assay-preview:8000"}]
    assert of(render(), "AnalysisTemplate") == []
