"""Keys: files that a non-root reader can read, and nowhere else."""

import subprocess
import tarfile
from pathlib import Path

from .conftest import CPU_IMAGE, DOCKER, GATE_IMAGE, REPO, Stack, docker

EVERY_PROCESS = """
import pathlib
for name in ("cmdline", "environ"):
    for path in pathlib.Path("/proc").glob(f"[0-9]*/{name}"):
        try:
            print(path, path.read_bytes())
        except OSError as error:
            print(path, error)
"""


def test_the_keys_work_and_are_found_nowhere(stack: Stack, tmp_path: Path) -> None:
    subprocess.run([REPO / "docker/make_secrets.sh", "secrets"], cwd=tmp_path, check=True)
    folder = tmp_path / "secrets"
    # make_secrets.sh says which uid that is; here the files belong to the images' own.
    for path in (folder, *folder.iterdir()):
        subprocess.run(["chown", "10001", path], check=True)
    keys = {name: (folder / name).read_text() for name in ("api_keys", "metrics_key")}
    for parent in [folder, *folder.parents][: len(folder.parents) - 1]:
        parent.chmod(parent.stat().st_mode | 0o055)
    stack.env.write_text(stack.env.read_text() + f"TEST_SECRETS={folder}\n")
    stack.files.append("docker/tests/keys.yaml")
    stack.up()

    assert stack.status() == 401
    assert stack.status("/health") == 200
    assert stack.status("/metrics") == 401
    stack.key = keys["api_keys"]
    assert "Paris" in stack.ask()
    mode = stack.python("import os; print(oct(os.stat('/run/assay/api_keys').st_mode))")
    assert mode.strip() == "0o100600"
    assert stack.scraped({"vllm", "canary"}) == {"vllm": "1", "canary": "1"}

    keys["bypass"] = stack.python("print(open('/run/assay/bypass.key').read().strip())").strip()
    places = {
        "processes of the server": stack.python(EVERY_PROCESS),
        "processes of the canary": stack.python(EVERY_PROCESS, "canary"),
    }
    for service in ("server", "canary", "prometheus"):
        places[f"docker inspect {service}"] = docker("inspect", stack.container(service))
        places[f"log of {service}"] = stack.log(service)
    for place, text in places.items():
        assert text.strip(), f"{place} shows nothing"
        for name, key in keys.items():
            assert key not in text, f"{name} is in {place}"
    for image in (CPU_IMAGE, GATE_IMAGE):
        assert docker("history", "--no-trunc", image)
        for name, key in keys.items():
            assert key not in docker("image", "inspect", image), f"{name} is in {image}"
    in_no_layer(GATE_IMAGE, [key.encode() for key in keys.values()], tmp_path)


def in_no_layer(image: str, needles: list[bytes], folder: Path) -> None:
    """Nothing of a build's secrets, or of ours, is in any layer."""
    archive = folder / "image.tar"
    subprocess.run([DOCKER, "save", "-o", archive, image], check=True)
    needles = [*needles, b"-----BEGIN " + b"PRIVATE KEY", b"[global]\nindex-url"]
    with tarfile.open(archive) as layers:
        for member in layers:
            if not member.name.endswith("layer.tar"):
                continue
            stream = layers.extractfile(member)
            assert stream is not None
            with tarfile.open(fileobj=stream) as layer:
                for file in layer:
                    if file.isfile() and (content := layer.extractfile(file)) is not None:
                        data = content.read()
                        assert not [n for n in needles if n in data], (member.name, file.name)
    archive.unlink()
