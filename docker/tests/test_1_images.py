"""What is in the images, before anything is served."""

import json
import subprocess
from pathlib import Path

import pytest

from .conftest import CPU_IMAGE, DOCKER, GATE_IMAGE, REPO, docker, messages, run
from .spoil import Fault, spoil

pytestmark = pytest.mark.usefixtures("engine")
IMAGES = (CPU_IMAGE, GATE_IMAGE)
MINIATURE = REPO / "models" / "miniature" / "checkpoint"


@pytest.mark.parametrize("image", IMAGES)
def test_it_was_built_from_this_commit(image: str) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True
    ).stdout.strip()
    labels = json.loads(docker("image", "inspect", image))[0]["Config"]["Labels"]
    assert labels["org.opencontainers.image.revision"] in (head, f"{head}-dirty")
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.parametrize("image", IMAGES)
def test_nobody_in_it_is_root(image: str) -> None:
    assert json.loads(docker("image", "inspect", image))[0]["Config"]["User"] == "10001:0"


@pytest.mark.parametrize("image", IMAGES)
def test_the_bill_of_materials_names_what_is_installed(image: str) -> None:
    code = (
        "import importlib.metadata as m, json, re;"
        "names = {re.sub('[-_.]+', '-', d.metadata['Name']).lower() for d in m.distributions()};"
        "bom = json.load(open('/usr/share/assay/sbom.cdx.json'));"
        "listed = {c['name'] for c in bom['components']};"
        "print(sorted(names - listed), len(listed), 'libc6' in listed)"
    )
    exit_code, said = run("--entrypoint", "python", image, "-c", code)
    assert exit_code == 0
    missing, count, libc = said.strip().rsplit(" ", 2)
    assert missing == "[]"
    assert int(count) > 150
    assert libc == "True"
    assert "libc6" in run("--entrypoint", "cat", image, "/usr/share/assay/licences.txt")[1]


def test_an_arbitrary_uid_of_group_0_can_keep_its_caches() -> None:
    code = "import pathlib; pathlib.Path('/var/cache/assay/probe').write_text('x'); print('kept')"
    assert run("--user", "54321:0", "--entrypoint", "python", CPU_IMAGE, "-c", code)[1] == "kept\n"


def refused(*arguments: str) -> str:
    """The one message of a server that starts nothing."""
    exit_code, said = run("--shm-size", "1g", *arguments, CPU_IMAGE)
    assert exit_code == 2, said
    (line,) = (message for message in messages(said) if message.startswith("assay: "))
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-e", "ASSAY_PROFILE=b300x8"), "is no profile of /opt/assay/profiles (b200x8,"),
        (("-e", "ASSAY_MODEL=/nowhere"), "/nowhere holds no checkpoint"),
        (("-e", "STARTUP_BUDGET=soon"), "STARTUP_BUDGET='soon': must be a positive number"),
        (("-e", "ASSAY_STALLED_AFTER=-1"), "ASSAY_STALLED_AFTER='-1': must be a number of seconds"),
        (("--shm-size", "64m"), "/dev/shm has 64 MiB, 1 workers need 192 MiB: set shm_size"),
        (("--ulimit", "nofile=512:512"), "only 512 files may be open, 4096 are needed"),
        (("--tmpfs", "/var/cache/assay:size=1m,mode=1777"), "the disk of the cache has 1 MiB free"),
        (("-v", "/usr/lib:/var/cache/assay:ro"), "the cache cannot be written by uid 10001"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments)


def test_weights_cut_short_are_refused_before_vllm_starts(tmp_path: Path) -> None:
    for file in MINIATURE.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    tmp_path.chmod(0o755)
    line = refused("-v", f"{tmp_path}:/model:ro", "-e", "ASSAY_MODEL=/model")
    assert "model-00002-of-00003.safetensors" in line


def test_a_wrong_number_of_gpus_is_refused(tmp_path: Path) -> None:
    fake = tmp_path / "nvidia-smi"
    four = "for i in 1 2 3 4; do echo 'NVIDIA B200, 183359, 10.0, 580.82.07'; done"
    fake.write_text(f"#!/bin/sh\n{four}\n")
    fake.chmod(0o755)
    profile = ("-e", "ASSAY_PROFILE=b200x8", "--shm-size", "16g")
    assert "profile b200x8 needs 8 GPUs, 0 are visible" in refused(*profile)
    line = refused(*profile, "-v", f"{fake}:/usr/bin/nvidia-smi:ro")
    assert "profile b200x8 needs 8 GPUs, 4 are visible: give the container all of them" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [("nan", "weight_scale: never loaded, or NaN in the file"), ("rolled", "so nothing is served")],
)
def test_weights_that_are_wrong_inside_are_never_served(
    tmp_path: Path, fault: Fault, words: str
) -> None:
    """Their headers are sound. A NaN is found while they are loaded; wrong numbers are loaded, and
    the suite's questions are not answered as they should be."""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    assert spoil(MINIATURE, tmp_path / "model", fault) > 0
    arguments = ("--shm-size", "1g", "-v", f"{tmp_path / 'model'}:/model:ro")
    exit_code, said = run(*arguments, "-e", "ASSAY_MODEL=/model", CPU_IMAGE, timeout=500)
    assert exit_code == 1, said
    assert any(words in message for message in messages(said)), said[-3000:]


def compose_gpus(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """compose.yaml itself, with the CPU image in place of the CUDA one."""
    variables = {
        "ASSAY_CUDA_IMAGE": CPU_IMAGE, "ASSAY_GATE_IMAGE": GATE_IMAGE, "ASSAY_PORT": 18610,
        "MODEL_REVISION": "0" * 40, "MODEL_DIR": MINIATURE, "SECRETS_DIR": folder,
        "TEST_NVIDIA_SMI": folder / "nvidia-smi",
    }  # fmt: skip
    (folder / "env").write_text("".join(f"{name}={v}\n" for name, v in variables.items()))
    command = [DOCKER, "compose", "-p", "assay-gpus", "--env-file", str(folder / "env")]
    command += ["-f", "compose.yaml", "-f", "docker/tests/gpus.yaml", *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)


def test_compose_s_gpus_reach_the_container_and_too_few_are_refused(tmp_path: Path) -> None:
    """A hook that does nothing stands in for NVIDIA's; the wiring is real, the GPUs are not."""
    for name in ("api_keys", "metrics_key", "hf_token", "grafana_password"):
        (tmp_path / name).write_text(f"{name}\n")
        (tmp_path / name).chmod(0o644)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    four = "for i in 1 2 3 4; do echo 'NVIDIA B200, 183359, 10.0, 580.82.07'; done"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{four}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    server = "assay-gpus-server-1"
    try:
        made = compose_gpus(tmp_path, "create", "weights", "server")
        assert made.returncode == 0, made.stderr
        (request,) = json.loads(docker("inspect", server))[0]["HostConfig"]["DeviceRequests"]
        assert (request["Driver"], request["Count"], request["Capabilities"]) == (
            "nvidia", 8, [["gpu"]],
        )  # fmt: skip
        started = subprocess.run(
            [DOCKER, "start", "--attach", server], capture_output=True, text=True, timeout=120
        )
        if "could not select device driver" in started.stderr:
            pytest.skip("this daemon has no nvidia-container-runtime-hook, not even a stub")
        assert started.returncode == 2, started.stderr + started.stdout
        (line,) = (m for m in messages(started.stdout) if m.startswith("assay: "))
        assert "profile b200x8 needs 8 GPUs, 4 are visible: give the container all of them" in line
    finally:
        compose_gpus(tmp_path, "down", "--volumes", "--timeout", "1")
