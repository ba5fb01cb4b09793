"""What a launcher was asked to do: its flags, the profile, and the variables around them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from assay_kernels import settings as plugin_settings
from assay_kernels.launcher import arguments, host, logfile, watchdog

STOP_MARGIN_SECONDS = 20.0
"""Beyond vLLM's own shutdown-timeout: time to end processes after the last request."""

DEFAULT_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
FORCED_ENVIRONMENT = {
    # The processes are told apart by their titles.
    "VLLM_PROCESS_NAME_PREFIX": "VLLM",
    # That front end runs no ASGI middleware, so no door.
    "VLLM_USE_RUST_FRONTEND": "0",
}
LOCAL_MODEL_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class LaunchError(Exception):
    """Ends the launcher with one message and an exit code: 2 nothing was started, 1 it failed."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Settings:
    model: str
    """Folder of a checkpoint, or a name that vLLM resolves."""
    profile: Path
    """vLLM config file; variables for it stand beside it in a file of the same name with .env."""
    host: str = "127.0.0.1"
    port: int = 8000
    extra: tuple[str, ...] = ()
    """Further arguments for `vllm serve`."""
    state: Path = Path(".assay")
    require: bool = True
    """Open the door only if every vLLM process has proven the plugin (ASSAY_REQUIRE)."""
    start_seconds: float = 1800.0
    echo: logfile.Echo | None = None
    """Also write vLLM's log to standard output, in this form; the file is then kept small."""
    vllm: tuple[str, ...] = field(
        default=(sys.executable, "-m", "assay_kernels.launcher.vllm_main", "serve")
    )

    @property
    def log(self) -> Path:
        return self.state / "serve.log"

    @property
    def run_dir(self) -> Path:
        return self.state.absolute() / "run"

    @property
    def key_file(self) -> Path:
        """The door's bypass key, for who may read this folder: a canary beside the server."""
        return self.state.absolute() / "bypass.key"

    @cached_property
    def flags(self) -> dict[str, Any]:
        """The profile: vLLM's flags and their values. Raises LaunchError."""
        return read_profile(self.profile)

    @cached_property
    def variables(self) -> dict[str, str]:
        """The caller's environment over the profile's variables."""
        path = self.profile.with_suffix(".env")
        return (read_env_file(path) if path.is_file() else {}) | dict(os.environ)

    @cached_property
    def checkpoint(self) -> dict[str, Any] | None:
        """The model's config.json; None where the model is no local folder. Raises LaunchError."""
        folder = Path(self.model)
        return read_config(folder / "config.json") if folder.is_dir() else None

    @property
    def keys_file(self) -> str:
        """File of the keys that clients need; empty: none are asked for."""
        return self.variables.get("ASSAY_API_KEYS_FILE", "")

    @property
    def cache_folder(self) -> Path:
        """Where everything that is compiled while serving is kept."""
        return plugin_settings.cache_folder(self.variables)

    @property
    def left_out_by(self) -> str | None:
        """What keeps vLLM from loading the plugin, in words; None when nothing does."""
        allowed = os.environ.get("VLLM_PLUGINS")
        if allowed is None or "assay" in allowed.split(","):
            return None
        return f"VLLM_PLUGINS={allowed} does not name assay"

    @property
    def grace(self) -> float:
        """Seconds between the wish to stop and the kill: what requests get, and a margin."""
        value = arguments.given(self.extra, self.flags).get("--shutdown-timeout", "0")
        try:
            return float(value) + STOP_MARGIN_SECONDS
        except ValueError:
            raise LaunchError(
                f"shutdown-timeout must be a number of seconds, is {value!r}"
                f" (the profile {self.profile} or an argument)",
                2,
            ) from None

    @property
    def thread_binding(self) -> str | None:
        """Cores for each worker where vLLM cannot choose them itself and nobody else did."""
        given = self.variables
        if "VLLM_CPU_OMP_THREADS_BIND" in given or "VLLM_CPU_SIM_MULTI_NUMA" in given:
            return None
        return host.thread_binding(
            arguments.ranks(self.extra, self.flags),
            host.numa_nodes(),
            host.physical_cores(),
            sorted(os.sched_getaffinity(0)),
        )

    @property
    def environment(self) -> dict[str, str]:
        """vLLM's: the caller's wins over the profile's, which wins over the defaults."""
        env = dict(DEFAULT_ENVIRONMENT)
        if Path(self.model).is_dir():
            env |= LOCAL_MODEL_ENVIRONMENT
        env |= self.variables
        if (binding := self.thread_binding) is not None:
            env["VLLM_CPU_OMP_THREADS_BIND"] = binding
        env |= FORCED_ENVIRONMENT
        return env | {
            "ASSAY_BYPASS_KEY_FILE": str(self.key_file),
            "ASSAY_REQUIRE": str(int(self.require)),
            "ASSAY_RUN_DIR": str(self.run_dir),
        }

    @property
    def command(self) -> list[str]:
        return [
            *self.vllm,
            self.model,
            "--config",
            str(self.profile),
            "--host",
            self.host,
            "--port",
            str(self.port),
            "--middleware",
            "assay_kernels.vllm_plugin.door.ClosedDoor",
            *self.extra,
        ]


def read_profile(path: Path) -> dict[str, Any]:
    try:
        profile = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise LaunchError(f"cannot read the profile {path}: {_in_one_line(error)}", 2) from error
    if not isinstance(profile, dict):
        raise LaunchError(f"the profile {path} is not a table of vLLM's flags", 2)
    return {str(name): value for name, value in profile.items()}


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}", 2) from error
    except ValueError as error:
        raise LaunchError(f"{path} is not JSON: {_in_one_line(error)}", 2) from error
    if not isinstance(config, dict):
        raise LaunchError(f"{path} is not a table of settings", 2)
    return config


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def read_env_file(path: Path) -> dict[str, str]:
    """KEY=VALUE lines, as `docker run --env-file` reads them: no quotes, `#` for comments."""
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"cannot read {path}: {_in_one_line(error)}", 2) from error
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def stalled_after(environ: Mapping[str, str]) -> float:
    """Seconds without progress after which the server is ended; 0: never. Raises ValueError."""
    text = environ.get("ASSAY_STALLED_AFTER", "") or str(watchdog.DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"ASSAY_STALLED_AFTER={text!r}: must be a number of seconds, 0 for never")
    return seconds
