"""What stands beside a profile and cannot be read is named, in one line."""

from pathlib import Path

import pytest

from assay_kernels.launcher.settings import LaunchError, Settings


def settings(folder: Path) -> Settings:
    (folder / "profile.yaml").write_text("port: 8000\n")
    return Settings(str(folder), folder / "profile.yaml", state=folder)


def test_variables_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "profile.env").write_bytes(b"A=\xff\n")
    with pytest.raises(LaunchError, match=r"cannot read .*profile\.env") as raised:
        _ = settings(tmp_path).variables
    assert raised.value.code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[]", "is not a table of settings"), (None, "cannot read")],
)
def test_a_config_that_cannot_be_read_is_named(
    tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(LaunchError, match=rf"config\.json.* {words}|{words} .*config\.json"):
        _ = settings(tmp_path).checkpoint
