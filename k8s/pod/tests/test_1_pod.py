"""The rendered pod runs: it becomes Ready by its own probes, and only then."""

from conftest import OPEN_SECONDS, Client
from kubelet import Pod, docker


def test_it_becomes_ready_and_not_before_its_door_is_open(pod: Pod, client: Client) -> None:
    seen: set[tuple[bool, int]] = set()

    def ready() -> bool:
        found = pod.ready, client.status()
        seen.add(found)
        return found[0]

    pod.wait(ready, OPEN_SECONDS)
    assert client.status() == 200
    assert {status for is_ready, status in seen if is_ready} == {200}
    assert pod.restarts == {"server": 0, "canary": 0}, pod.events


def test_every_rendered_probe_was_asked_and_passes(pod: Pod) -> None:
    asked = {
        (name, kind): probe.runs
        for name, container in pod.containers.items()
        for kind, probe in container.probes.items()
    }
    assert set(asked) == {
        ("server", "startup"), ("server", "liveness"), ("server", "readiness"),
        ("canary", "startup"), ("canary", "liveness"),
    }  # fmt: skip
    pod.wait(lambda: all(p.runs for c in pod.containers.values() for p in c.probes.values()), 60)
    for container in pod.containers.values():
        assert not any(p.failed for k, p in container.probes.items() if k != "startup"), pod.probed


def test_clients_need_a_key_and_are_answered(client: Client) -> None:
    assert client.status({}) == 401
    assert "Paris" in client.ask()


def test_it_runs_as_the_manifest_s_user_without_root_or_capabilities(pod: Pod) -> None:
    code = (
        "import os; print(os.getuid(), sorted(os.getgroups()), os.access('/opt/assay', os.W_OK),"
        " [l.split()[1] for l in open('/proc/self/status') if l.startswith('CapEff')])"
    )
    ok, said = pod.containers["server"].exec(["python", "-c", code], 30)
    assert ok, said
    assert said == "10001 [0, 10001] False ['0000000000000000']"


def test_the_keys_are_readable_for_their_group_alone(pod: Pod) -> None:
    mode = docker(
        "exec", pod.containers["server"].id, "stat", "-c", "%a %u %g", "/etc/assay/keys/api_keys"
    )
    assert mode == "440 0 10001"
