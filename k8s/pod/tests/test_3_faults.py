"""What must happen when something breaks, on the pod that runs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chart import ROOT
from conftest import NAMESPACE, OPEN_SECONDS, STALLED_SECONDS, Client, monitored, pod_of, rendered
from kubelet import Pod
from spoil import spoil

FREEZE = """
import os, signal
from assay_kernels.launcher import procfs
(pid,) = [p for p in procfs.descendants(1) if procfs.title(p).startswith("VLLM::EngineCore")]
os.kill(pid, signal.SIGSTOP)
"""


def test_a_frozen_engine_is_ended_and_the_pod_becomes_ready_again(pod: Pod, client: Client) -> None:
    pod.wait(lambda: pod.ready, OPEN_SECONDS)
    ok, said = pod.containers["server"].exec(["python", "-c", FREEZE], 30)
    assert ok, said
    pod.wait(lambda: pod.restarts["server"] == 1, 4 * STALLED_SECONDS)
    assert pod.containers["server"].exits == [1]
    assert "the server was ended because" in pod.containers["server"].log()
    pod.wait(lambda: pod.ready, OPEN_SECONDS)
    assert "Paris" in client.ask()
    assert pod.restarts["canary"] == 0


def test_a_deletion_under_load_loses_no_stream(pod: Pod, client: Client) -> None:
    """Streams that run when the pod is deleted, and one that comes while proxies still send."""
    pod.wait(lambda: pod.ready, OPEN_SECONDS)
    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(client.stream, 60) for _ in range(10)]
        time.sleep(1)
        deletion = pool.submit(pod.delete)
        time.sleep(2)  # within preStop
        late = pool.submit(client.stream, 20)
        ends = [stream.result() for stream in (*streams, late)]
        took = deletion.result()
    assert {how for _, how in ends} == {"finished"}, ends
    assert took < pod.grace
    assert pod.containers["server"].exits[-1] == 0, pod.events


def test_incoherent_weights_are_never_served_and_an_alert_fires(
    engine: None, tmp_path: Path
) -> None:
    claim = tmp_path / "claim"
    assert spoil(ROOT / "models/miniature/checkpoint", claim / "bad", "rolled") > 0
    for folder in (claim, *tmp_path.parents[:2], tmp_path):
        folder.chmod(0o755)
    objects = rendered(weights={"source": "claim", "claim": {"name": "weights"}, "subPath": "bad"})
    with pod_of(objects, "incoherent", {"weights": claim}).running() as pod:
        (tmp_path / "prometheus").mkdir()
        client, statuses = Client(pod), set()
        with monitored(pod, objects, tmp_path / "prometheus", "assay-prometheus-2") as metrics:

            def fires() -> bool:
                assert not pod.ready
                statuses.add(client.status())
                return "AssayIncoherent" in metrics.firing()

            pod.wait(fires, OPEN_SECONDS + 180)
            (alert,) = metrics.query('ALERTS{alertname="AssayIncoherent",alertstate="firing"}')
            assert alert["metric"]["namespace"] == NAMESPACE
            assert alert["metric"]["severity"] == "critical"
    assert statuses <= {0, 503}
    assert pod.restarts["server"] == 0, pod.events
