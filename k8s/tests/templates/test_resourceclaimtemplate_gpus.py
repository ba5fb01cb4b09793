"""templates/resourceclaimtemplate-gpus.yaml"""

from chart import of, one, refusal, render


def test_it_claims_the_gpus_of_one_pod() -> None:
    (request,) = one(render(ci="dra"), "ResourceClaimTemplate")["spec"]["spec"]["devices"][
        "requests"
    ]
    assert request["exactly"]["count"] == 8
    assert of(render(), "ResourceClaimTemplate") == []
    assert "gpu.count is 0" in refusal({"gpu": {"count": 0}}, ci="dra")
