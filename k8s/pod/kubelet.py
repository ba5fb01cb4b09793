"""Runs a rendered pod on a container engine, as a kubelet would: volumes, security context, probes,
restarts, preStop and grace are the manifest's own.

A manifest that asks for something that is not understood here is an error, not ignored: what runs
is what was rendered. Not a kubelet: no scheduling, no admission, no volumes but emptyDir,
ConfigMap, Secret and a folder of this host for a claim; a cpu limit above the host's processors is
the host's.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Object = dict[str, Any]
DOCKER = os.environ.get("DOCKER", "docker")
BACKOFF_SECONDS = (0.0, 10.0, 20.0, 40.0)
"""Before the first, second, ... restart of a container."""
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
POD_FIELDS = {
    "automountServiceAccountToken", "containers", "enableServiceLinks", "restartPolicy",
    "securityContext", "serviceAccountName", "terminationGracePeriodSeconds", "volumes",
}  # fmt: skip
CONTAINER_FIELDS = {
    "args", "command", "env", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name",
    "ports", "readinessProbe", "resources", "securityContext", "startupProbe", "volumeMounts",
}  # fmt: skip
HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def address(container: str) -> str:
    """On the engine's own bridge."""
    return docker("inspect", "-f", "{{.NetworkSettings.IPAddress}}", container)


def docker(*arguments: str, check: bool = True, timeout: float = 120) -> str:
    answer = subprocess.run([DOCKER, *arguments], capture_output=True, text=True, timeout=timeout)
    assert not check or answer.returncode == 0, f"docker {arguments[:3]}: {answer.stderr}"
    return answer.stdout.strip()


def quantity(text: object) -> float:
    """Kubernetes' `512Mi`, `200m` as a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|[kMG]i?|)", str(text))
    assert match, text
    return float(match[1]) * (0.001 if match[2] == "m" else UNITS[match[2]])


def known(what: Mapping[str, Any], fields: set[str], where: str) -> None:
    unknown = set(what) - fields
    assert not unknown, f"{where}: {sorted(unknown)} are not understood here"


@dataclass
class Probe:
    """One rendered probe and what it has found."""

    spec: Object
    runs: int = 0
    failed: int = 0
    """In a row."""
    passed: int = 0
    said: str = ""

    def note(self, ok: bool, said: str) -> None:
        self.runs += 1
        self.said = said
        self.failed, self.passed = (0, self.passed + 1) if ok else (self.failed + 1, 0)

    @property
    def succeeds(self) -> bool:
        return self.passed >= self.spec.get("successThreshold", 1)

    @property
    def fails(self) -> bool:
        return self.failed >= self.spec.get("failureThreshold", 3)


class Container:
    """One container of the pod over all its restarts."""

    def __init__(self, pod: Pod, spec: Object) -> None:
        known(spec, CONTAINER_FIELDS, f"container {spec['name']}")
        self.pod, self.spec = pod, spec
        self.name: str = spec["name"]
        self.restarts = 0
        self.exits: list[int] = []
        self.probes: dict[str, Probe] = {}
        self.started = self.ready = False
        self.id = ""
        self.thread = threading.Thread(target=self._live, name=self.name, daemon=True)

    # --- the container ------------------------------------------------------------------------

    def arguments(self) -> list[str]:
        context = self.spec["securityContext"]
        assert context == HARDENED, context
        limits = self.spec["resources"]["limits"]
        env = {e["name"]: str(e["value"]) for e in self.spec.get("env", [])}
        mounts = []
        for mount in self.spec["volumeMounts"]:
            known(mount, {"name", "mountPath", "readOnly"}, f"mount {mount['name']}")
            volume = self.pod.volume(mount["name"])
            mode = "ro" if mount.get("readOnly") else "rw"
            if not volume.startswith("/"):
                mode += (
                    ",nocopy"  # an engine would give it the owner and mode of the image's folder
                )
            mounts += ["-v", f"{volume}:{mount['mountPath']}:{mode}"]
        expand = lambda text: re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), text)  # noqa: E731
        command = [expand(part) for part in self.spec.get("command", [])]
        arguments = [expand(part) for part in self.spec.get("args", [])]
        return [
            "--network", f"container:{self.pod.sandbox}", *self.pod.user(),
            "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true",
            "--memory", str(int(quantity(limits["memory"]))),
            "--cpus", str(min(quantity(limits["cpu"]), os.cpu_count() or 1)),
            *[part for name, value in env.items() for part in ("--env", f"{name}={value}")],
            *mounts,
            *(["--entrypoint", command[0]] if command else []),
            self.spec["image"], *command[1:], *arguments,
        ]  # fmt: skip

    def _live(self) -> None:
        while not self.pod.ending.is_set():
            name = f"{self.pod.sandbox}-{self.name}-{self.restarts}"
            self.started = self.ready = False
            self.id = docker("run", "--detach", "--name", name, *self.arguments())
            self.pod.note(self.name, "started")
            self._probe()
            code = int(docker("wait", self.id, timeout=900))
            self.started = self.ready = False
            self.exits.append(code)
            self.pod.note(self.name, f"exited with {code}")
            if self.pod.ending.wait(BACKOFF_SECONDS[min(self.restarts, len(BACKOFF_SECONDS) - 1)]):
                return
            self.restarts += 1

    @property
    def running(self) -> bool:
        return docker("inspect", "-f", "{{.State.Running}}", self.id, check=False) == "true"

    def log(self) -> str:
        """Of every start."""
        logs = []
        for number in range(self.restarts + 1):
            answer = subprocess.run(
                [DOCKER, "logs", f"{self.pod.sandbox}-{self.name}-{number}"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            logs.append(answer.stdout)
        return "".join(logs)

    def end(self, grace: float) -> None:
        """preStop, SIGTERM, and SIGKILL once the grace, which counts both, is over."""
        began = time.monotonic()
        if hook := self.spec.get("lifecycle", {}).get("preStop"):
            known(hook, {"exec"}, "preStop")
            self.exec(hook["exec"]["command"], grace)
        left = max(1, int(grace - (time.monotonic() - began)))
        docker("stop", "--time", str(left), self.id, check=False, timeout=grace + 60)

    def exec(self, command: list[str], timeout: float) -> tuple[bool, str]:
        try:
            answer = subprocess.run(
                [DOCKER, "exec", self.id, *command], capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return False, f"no answer in {timeout:.0f} s"
        return answer.returncode == 0, (answer.stdout + answer.stderr).strip()

    # --- its probes ---------------------------------------------------------------------------

    def _probe(self) -> None:
        """Until the container ends, by itself or because a probe has given it up."""
        self.probes = {
            kind: Probe(self.spec[f"{kind}Probe"])
            for kind in ("startup", "liveness", "readiness")
            if f"{kind}Probe" in self.spec
        }
        due = dict.fromkeys(self.probes, 0.0)
        while self.running and not self.pod.ending.is_set():
            startup = self.probes.get("startup")
            self.started = startup is None or self.started or startup.succeeds
            for kind, probe in self.probes.items():
                if (kind == "startup") == self.started or time.monotonic() < due[kind]:
                    continue
                due[kind] = time.monotonic() + probe.spec.get("periodSeconds", 10)
                probe.note(*self._ask(probe.spec))
                self.pod.probed[f"{self.name} {kind}"] = probe.said
                if kind != "readiness" and probe.fails:
                    self.pod.note(self.name, f"{kind} probe failed: {probe.said}")
                    self.end(self.pod.grace)
                    return
            readiness = self.probes.get("readiness")
            if readiness is None:
                ready = self.started
            else:
                ready = self.started and (
                    readiness.succeeds or (self.ready and not readiness.fails)
                )
            if ready != self.ready:
                self.pod.note(self.name, "ready" if ready else "not ready")
            self.ready = ready
            time.sleep(1)

    def _ask(self, spec: Object) -> tuple[bool, str]:
        known(
            spec,
            {"httpGet", "exec", "periodSeconds", "timeoutSeconds", "failureThreshold"},
            "probe",
        )
        timeout = spec.get("timeoutSeconds", 1)
        if "exec" in spec:
            return self.exec(spec["exec"]["command"], timeout)
        get = spec["httpGet"]
        known(get, {"path", "port"}, "httpGet")
        url = f"http://{self.pod.address}:{self.port(get['port'])}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:
                return answer.status < 400, str(answer.status)
        except (OSError, urllib.error.URLError) as error:
            return False, str(error)

    def port(self, name: object) -> int:
        return next(p["containerPort"] for p in self.spec["ports"] if p["name"] == name)


@dataclass
class Event:
    seconds: float
    """Since the pod's start."""
    container: str
    what: str


@dataclass
class Pod:
    """A pod of one Deployment, from the objects that helm rendered."""

    spec: Object
    maps: Mapping[str, Mapping[str, str]]
    """ConfigMaps by name, their data."""
    secrets: Mapping[str, Mapping[str, str]]
    claims: Mapping[str, Path] = field(default_factory=dict)
    """PersistentVolumeClaims by name: a folder of this host."""
    name: str = "pod"
    projected: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Contents of projected volumes by name: an account's token comes from no engine."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Names that a cluster's DNS would know: address."""

    def __post_init__(self) -> None:
        known(self.spec, POD_FIELDS, "the pod")
        self.sandbox = f"assay-{self.name}"
        self.address = ""
        self.ending = threading.Event()
        self.events: list[Event] = []
        self.probed: dict[str, str] = {}
        self.began = time.monotonic()
        self.grace = float(self.spec["terminationGracePeriodSeconds"])
        self.containers = {c["name"]: Container(self, c) for c in self.spec["containers"]}

    def note(self, container: str, what: str) -> None:
        self.events.append(Event(round(time.monotonic() - self.began, 1), container, what))

    def user(self) -> list[str]:
        """As the pod's security context has it; the image's user is not root either."""
        context = self.spec["securityContext"]
        fields = {"runAsNonRoot", "runAsUser", "fsGroup", "fsGroupChangePolicy", "seccompProfile"}
        known(context, fields, "securityContext")
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}  # the engine's own default
        return ["--user", f"{context['runAsUser']}:0", "--group-add", str(context["fsGroup"])]

    # --- volumes ------------------------------------------------------------------------------

    def volume(self, name: str) -> str:
        """Name of the engine's volume, or the folder of a claim."""
        (spec,) = [v for v in self.spec["volumes"] if v["name"] == name]
        if claim := spec.get("persistentVolumeClaim"):
            return str(self.claims[claim["claimName"]])
        return f"{self.sandbox}-{name}"

    def _make_volumes(self, staging: Path) -> None:
        """Empty directories as they are, and files of ConfigMaps and Secrets into `staging`."""
        for spec in self.spec["volumes"]:
            name, (kind,) = spec["name"], set(spec) - {"name"}
            what = spec[kind]
            options: list[str] = []
            if kind == "persistentVolumeClaim":
                continue
            if kind == "emptyDir":
                known(what, {"medium", "sizeLimit"}, f"volume {name}")
                if what.get("medium") == "Memory":
                    size = int(quantity(what["sizeLimit"]))
                    options = ["-o", "type=tmpfs", "-o", "device=tmpfs", "-o", f"o=size={size}"]
            else:
                known(
                    what,
                    {"name", "secretName", "defaultMode", "items", "sources"},
                    f"volume {name}",
                )
                data = self._files(name, kind, what)
                items = what.get("items") or [{"key": key, "path": key} for key in data]
                (staging / name).mkdir()
                for item in items:
                    file = staging / name / item["path"]
                    file.write_text(data[item["key"]])
                    file.chmod(what.get("defaultMode", 0o644))
            docker("volume", "create", *options, f"{self.sandbox}-{name}")

    def _files(self, volume: str, kind: str, what: Object) -> Mapping[str, str]:
        if kind == "configMap":
            return self.maps[what["name"]]
        if kind == "secret":
            return self.secrets[what["secretName"]]
        assert kind == "projected", kind
        return self.projected[volume]

    def _start_sandbox(self, staging: Path) -> None:
        """As a pause container: holds the network, and the volumes while containers restart."""
        group = self.spec["securityContext"]["fsGroup"]
        names = [v["name"] for v in self.spec["volumes"] if "persistentVolumeClaim" not in v]
        script = (
            f"for d in /volumes/*; do n=${{d##*/}}; cp -a /staging/$n/. $d/ 2>/dev/null;"
            f" chown -R 0:{group} $d; chmod 2777 $d; done; touch /tmp/ready; exec sleep infinity"
        )
        mounts = [p for n in names for p in ("-v", f"{self.sandbox}-{n}:/volumes/{n}:nocopy")]
        hosts = [p for n, a in self.hosts.items() for p in ("--add-host", f"{n}:{a}")]
        image = self.spec["containers"][0]["image"]
        docker(
            "run", "--detach", "--name", self.sandbox, "--user", "0:0", *mounts, *hosts,
            "-v", f"{staging}:/staging:ro", "--entrypoint", "sh", image, "-c", script,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while docker("exec", self.sandbox, "ls", "/tmp/ready", check=False) == "":
            assert time.monotonic() < deadline, docker("logs", self.sandbox)
            time.sleep(0.2)
        self.address = address(self.sandbox)

    # --- life ---------------------------------------------------------------------------------

    @contextmanager
    def prepared(self) -> Iterator[Pod]:
        """With network and volumes; gone afterwards, whatever happened."""
        self.remove()
        with tempfile.TemporaryDirectory() as name:
            staging = Path(name)
            staging.chmod(0o755)
            try:
                self._make_volumes(staging)
                self._start_sandbox(staging)
                yield self
            finally:
                self.ending.set()
                self.remove()

    @contextmanager
    def running(self) -> Iterator[Pod]:
        """Started, and each container started again when it ends."""
        with self.prepared():
            for container in self.containers.values():
                container.thread.start()
            yield self

    def once(self, timeout: float) -> tuple[int, str]:
        """(exit code, log) of the one container of a Job's pod, which is not started again."""
        assert self.spec["restartPolicy"] == "Never"
        (container,) = self.containers.values()
        with self.prepared():
            container.id = docker(
                "run", "--detach", "--name", f"{self.sandbox}-{container.name}-0",
                *container.arguments(),
            )  # fmt: skip
            return int(docker("wait", container.id, timeout=timeout)), container.log()

    def remove(self) -> None:
        """Whatever is left of a pod of this name."""
        for _ in range(5):  # an engine under load may leave one behind
            ids = docker("ps", "-aq", "--filter", f"name=^{self.sandbox}").split()
            if not ids:
                break
            docker("rm", "--force", *ids, check=False)
        volumes = docker("volume", "ls", "-q", "--filter", f"name=^{self.sandbox}-").split()
        if volumes:
            docker("volume", "rm", "--force", *volumes, check=False)

    @property
    def ready(self) -> bool:
        return all(container.ready for container in self.containers.values())

    @property
    def restarts(self) -> dict[str, int]:
        return {name: c.restarts for name, c in self.containers.items()}

    def wait(self, until: Callable[[], bool], seconds: float) -> float:
        """Seconds until it was so. Fails with what the pod has seen."""
        began = time.monotonic()
        while not until():
            late = time.monotonic() - began > seconds
            assert not late, f"{self.events[-12:]}\n{self.probed}\n{self.tail()}"
            time.sleep(1)
        return time.monotonic() - began

    def tail(self) -> str:
        return "\n".join(f"{n}: {c.log()[-1500:]}" for n, c in self.containers.items() if c.id)

    def delete(self) -> float:
        """As `kubectl delete pod`; seconds that it took."""
        began = time.monotonic()
        self.ending.set()
        threads = [
            threading.Thread(target=c.end, args=(self.grace,)) for c in self.containers.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for container in self.containers.values():
            container.thread.join(30)
        return time.monotonic() - began
