"""templates/configmap-profile.yaml"""

import yaml
from chart import container, env, of, one, pod_spec, refusal, render


def test_an_inline_profile_is_the_one_that_is_launched() -> None:
    objects = render(ci="everything")
    data = one(objects, "ConfigMap", "-profile")["data"]
    assert yaml.safe_load(data["own.yaml"]) == {
        "served-model-name": "own",
        "tensor-parallel-size": 8,
    }
    assert data["own.env"] == "ASSAY_ARCH=sm_100\n"
    found = container(pod_spec(one(objects, "Deployment")), "server")
    assert env(found)["ASSAY_PROFILE"] == "/etc/assay/profiles/own.yaml"
    assert "/etc/assay/profiles" in [m["mountPath"] for m in found["volumeMounts"]]


def test_a_named_profile_is_the_image_s() -> None:
    assert of(render(), "ConfigMap", "-profile") == []
    assert "profile.inlineEnv" in refusal({"profile": {"inlineEnv": "A=1"}})
