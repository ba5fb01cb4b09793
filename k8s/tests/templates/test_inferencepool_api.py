"""templates/inferencepool-api.yaml"""

from chart import of, one, refusal, render


def test_it_selects_the_servers_and_names_its_picker() -> None:
    objects = render(ci="everything")
    pool = one(objects, "InferencePool")["spec"]
    assert pool["selector"]["matchLabels"] == one(objects, "Service")["spec"]["selector"]
    assert pool["endpointPickerRef"]["name"] == "assay-picker"
    values = {"route": {"enabled": True, "parentRefs": [{"name": "g"}], "inferencePool": True}}
    assert "route.endpointPicker" in refusal(values)
    assert of(render(), "InferencePool") == []
