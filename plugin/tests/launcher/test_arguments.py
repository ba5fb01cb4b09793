"""What may be said to `vllm serve`."""

import pytest

from assay_kernels.launcher import arguments


@pytest.mark.parametrize("name", sorted(arguments.INSTEAD))
def test_every_way_past_the_door_is_refused_however_it_is_spelt(name: str) -> None:
    for spelling in (name, f"{name}=1", name.replace("-", "_").replace("__", "--", 1)):
        assert name in (arguments.obstacle([spelling], {}) or "")
    assert name in (arguments.obstacle([], {name[2:]: "x"}) or "")


def test_other_flags_pass() -> None:
    given = ["--max-model-len", "64", "-tp", "2", "--served-model-name", "x", "--root-path=/api"]
    assert arguments.obstacle(given, {"enforce-eager": True, "generation-config": "vllm"}) is None


@pytest.mark.parametrize(
    ("extra", "profile", "ranks"),
    [
        ([], {}, 1),
        (["--tensor-parallel-size", "2"], {}, 2),
        (["--tensor_parallel_size=2", "-dp", "2"], {}, 4),
        (["-tp=2"], {"tensor-parallel-size": 4}, 2),
        ([], {"tensor_parallel_size": 4, "pipeline-parallel-size": 2}, 8),
        (["--enforce-eager", "-tp", "x"], {}, 1),
        (["--data-parallel-size=16", "--data-parallel-size-local=8"], {}, 8),
        (["-dp", "4", "-dpl", "2"], {"tensor-parallel-size": 2}, 4),
    ],
)
def test_workers_are_counted(extra: list[str], profile: dict[str, object], ranks: int) -> None:
    assert arguments.ranks(extra, profile) == ranks


def test_of_several_nodes_all_workers_are_counted_too() -> None:
    extra = ["--data-parallel-size=16", "--data-parallel-size-local=8"]
    assert arguments.all_ranks(extra, {"data-parallel-size": 8}) == 16
    assert arguments.all_ranks([], {"data-parallel-size": 8}) == 8
