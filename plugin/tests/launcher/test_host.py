"""What the launcher says of the machine."""

import socket
from pathlib import Path

import pytest

from assay_kernels.launcher import host


def cpu(*flags: str) -> host.Cpu:
    return host.Cpu(frozenset(flags))


def test_a_cpu_without_avx2_is_refused() -> None:
    assert "AVX2" in (cpu("avx").obstacle() or "")
    assert cpu("avx2").obstacle() is None


def test_a_cpu_without_amx_tiles_is_called_slower() -> None:
    assert "slower" in cpu("avx2", "avx512f", "avx512_bf16").describe()
    amx = cpu("avx2", "avx512f", "amx_tile", "amx_bf16")
    assert "slower" not in amx.describe()
    assert "slower" in amx.describe("torch")


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    folder = tmp_path / "docker" / "profiles"
    folder.mkdir(parents=True)
    for name in ("b200x8", "h200x8", "h200x1"):
        (folder / f"{name}.yaml").touch()
    return folder


@pytest.mark.parametrize(
    ("names", "profile"),
    [
        (["NVIDIA B200"] * 8, "b200x8"),
        (["NVIDIA H200"] * 8, "h200x8"),
        (["NVIDIA H200 NVL"], "h200x1"),
        (["NVIDIA H200"] * 4, "h200x1"),
    ],
)
def test_gpus_are_told_their_profile_and_command(
    profiles: Path, names: list[str], profile: str
) -> None:
    (profiles.parents[1] / "compose.yaml").touch()
    (line,) = host.Gpus(tuple(names)).advice(profiles)
    assert f"{profile}.yaml" in line
    assert line.endswith(f"ASSAY_PROFILE={profile} docker compose up")


def test_what_this_version_lacks_is_said(profiles: Path) -> None:
    (line,) = host.Gpus(("NVIDIA H200",)).advice(profiles)
    assert line.endswith("(this version has no compose.yaml yet)")
    (line,) = host.Gpus(("NVIDIA H100 80GB HBM3",)).advice(profiles)
    assert "h100x1.yaml, which this version does not have yet" in line


@pytest.mark.parametrize("name", ["NVIDIA B300", "NVIDIA GB200", "NVIDIA A100-SXM4-80GB"])
def test_a_gpu_without_kernels_is_refused_in_one_line(profiles: Path, name: str) -> None:
    (line,) = host.Gpus((name,) * 8).advice(profiles)
    assert "not supported" in line or "no profile fits" in line


def test_gpus_are_found_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for slot in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "information").write_text("Model: \t NVIDIA H200\nIRQ: 1\n")
    assert host.Gpus.here(tmp_path).names == ("NVIDIA H200", "NVIDIA H200")
    assert host.Gpus.here(tmp_path / "none").names == ()


def test_a_taken_port_is_an_obstacle_and_a_free_one_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "in use" in (host.port_obstacle("127.0.0.1", port) or "")
    assert host.port_obstacle("127.0.0.1", port) is None
    assert "cannot listen" in (host.port_obstacle("192.0.2.1", port) or "")


@pytest.mark.parametrize(
    ("ranks", "nodes", "cores", "cpus", "binding"),
    [
        (1, 1, [0, 1], [0, 1], None),
        (2, 2, [0, 1], [0, 1], None),
        (2, 1, [0, 1], [0, 1], "0|1"),
        (2, 1, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], "0,1|2,3"),
        (2, 1, [0], [0, 8], "0|8"),
        (3, 1, [0, 1], [0, 1], "nobind"),
    ],
)
def test_workers_get_disjoint_cores_where_vllm_cannot_place_them(
    ranks: int, nodes: int, cores: list[int], cpus: list[int], binding: str | None
) -> None:
    assert host.thread_binding(ranks, nodes, cores, cpus) == binding


@pytest.mark.parametrize(("allowed", "nodes"), [("0", 1), ("0-1", 2), ("0-1,3", 3)])
def test_numa_nodes_are_counted(tmp_path: Path, allowed: str, nodes: int) -> None:
    (tmp_path / "status").write_text(f"Name:\tx\nMems_allowed_list:\t{allowed}\n")
    assert host.numa_nodes(tmp_path / "status") == nodes
