"""What stands in the way is said before vLLM starts, one line each, with what to do."""

from dataclasses import replace
from pathlib import Path

import pytest

from assay_kernels.launcher import preflight
from assay_kernels.launcher.preflight import GIB, Gpu, Machine, Wish

MINIATURE = Path(__file__).parents[3] / "models" / "miniature" / "checkpoint"
B200 = Gpu("NVIDIA B200", 183359 * 2**20, "10.0", "580.82.07")
NODE = Machine((B200,) * 8, True, 64 * GIB, 500 * GIB, "", 65536, -1)
WISH = Wish("b200x8", "sm_100", 8, {}, "cu130")


def test_a_node_that_fits_has_no_obstacle() -> None:
    assert preflight.obstacles(WISH, NODE) == []
    assert preflight.warnings(WISH, NODE) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": (B200,) * 7}, ("needs 8 GPUs, 7 are visible", "--gpus")),
        ({"gpus": ()}, ("needs 8 GPUs, 0 are visible",)),
        (
            {"gpus": (replace(B200, name="NVIDIA H200", capability="9.0"),) * 8},
            ("is for sm_100 (B200), this machine has NVIDIA H200 (compute capability 9.0)",),
        ),
        ({"gpus": (replace(B200, name="B300", capability="10.3"),) * 8}, ("B300, GB200 and Arm",)),
        (
            {"gpus": (replace(B200, driver="575.57.08"),) * 8},
            ("driver 575.57.08 is older than 580", "cu12 image takes 575.51.03"),
        ),
        ({"shm": 64 * 2**20}, ("/dev/shm has 64 MiB, 8 workers need 16.0 GiB", "shm_size")),
        ({"cache_free": GIB}, ("1.0 GiB free, 10.0 GiB are needed", "ASSAY_CACHE_DIR")),
        ({"cache_problem": "Permission denied"}, ("cannot be written by uid", "group 0")),
        ({"open_files": 1024}, ("only 1024 files may be open", "ulimits.nofile")),
    ],
)
def test_each_obstacle_is_one_line_that_says_what_to_do(
    change: dict[str, object], words: tuple[str, ...]
) -> None:
    (line,) = preflight.obstacles(WISH, replace(NODE, **change))
    assert "\n" not in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("driver", "variant", "refused"),
    [
        ("575.51.03", "cu12", False),
        ("575.51.02", "cu12", True),
        ("570.211.01", "cu12", True),
        ("580.65.06", "cu12", False),
        ("580.65.06", "cu130", False),
        ("579.99", "cu130", True),
    ],
)
def test_each_variant_has_its_oldest_driver(driver: str, variant: str, refused: bool) -> None:
    node = replace(NODE, gpus=(replace(B200, driver=driver),) * 8)
    assert bool(preflight.obstacles(replace(WISH, variant=variant), node)) is refused


def test_what_only_slows_is_a_warning() -> None:
    node = replace(NODE, nvlink=False, locked_memory=65536)
    assert preflight.obstacles(WISH, node) == []
    nvlink, memlock = preflight.warnings(WISH, node)
    assert "no NVLink that is up" in nvlink
    assert "memlock" in memlock


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"linear-backend": "marlin"}, "linear-backend marlin repacks wo_a"),
        ({"moe-backend": "deep_gemm_mega_moe"}, "cannot run NVFP4"),
    ],
)
def test_flags_that_garble_v4_are_refused(flags: dict[str, object], words: str) -> None:
    (line,) = preflight.obstacles(replace(WISH, flags=flags), NODE)
    assert words in line


CPU = Wish("miniature-cpu", flags={"tokenizer-mode": "deepseek_v4"})


def test_a_sound_checkpoint_and_its_profile_have_no_obstacle() -> None:
    assert preflight.model_obstacles(CPU, Machine(), MINIATURE) == []


def test_another_tokenizer_mode_is_refused() -> None:
    (line,) = preflight.model_obstacles(replace(CPU, flags={}), Machine(), MINIATURE)
    assert "tokenizer-mode must be deepseek_v4, is None" in line


def test_a_size_that_does_not_divide_the_heads_is_refused() -> None:
    flags = {"tokenizer-mode": "deepseek_v4", "tensor-parallel-size": 3}
    lines = preflight.model_obstacles(replace(CPU, flags=flags), Machine(), MINIATURE)
    assert [line for line in lines if "does not divide num_attention_heads 8" in line]


def test_a_model_that_is_larger_than_the_gpus_is_refused() -> None:
    small = replace(B200, memory=20 * 10**6)
    wish = replace(CPU, arch="sm_100", ranks=1)
    (line,) = preflight.model_obstacles(wish, Machine((small,)), MINIATURE)
    assert "does not fit 1 GPUs of 0 GB" in line


def test_a_model_that_several_nodes_hold_together_is_no_obstacle_to_one_of_them() -> None:
    """Experts are spread over all nodes' GPUs; the miniature's take 22 of its 25 MB."""
    gpu = replace(B200, memory=20 * 10**6)
    one_node = replace(CPU, arch="sm_100", ranks=1)
    assert preflight.model_obstacles(one_node, Machine((gpu,)), MINIATURE)
    assert not preflight.model_obstacles(
        replace(one_node, everywhere=8), Machine((gpu,)), MINIATURE
    )


def test_gpus_are_read_as_nvidia_smi_prints_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA B200, 183359, 10.0, 580.82.07'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.query_gpus() == (B200,)
    tool.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert preflight.query_gpus() == ()


def test_a_cache_that_is_no_folder_is_said_to_be_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problem, _ = preflight.writable(tmp_path / "file" / "cache")
    assert problem
