"""templates/service-preview.yaml"""

import pytest
from chart import of, one, render


@pytest.mark.parametrize(("active", "judged"), [("blue", "green"), ("green", "blue")])
def test_it_leads_to_the_colour_that_is_judged(active: str, judged: str) -> None:
    service = one(render({"blueGreen": {"active": active}}, ci="blue-green"), "Service", "-preview")
    assert service["spec"]["selector"]["assay/colour"] == judged


def test_with_one_colour_it_leads_there() -> None:
    objects = render({"blueGreen": {"green": {"enabled": False}}}, ci="blue-green")
    assert one(objects, "Service", "-preview")["spec"]["selector"]["assay/colour"] == "blue"


def test_without_colours_there_is_none() -> None:
    assert of(render(), "Service", "-preview") == []
