"""What the server images run: the launcher, told by the environment.

    python -m assay_kernels.launcher.entrypoint [arguments for vllm serve]

| variable | meaning |
|---|---|
| ASSAY_PROFILE | name of a profile in ASSAY_PROFILES, or a path |
| ASSAY_MODEL | folder of the checkpoint |
| ASSAY_HOST, ASSAY_PORT | where to listen (0.0.0.0, 8000) |
| ASSAY_STATE_DIR | run files, on tmpfs |
| ASSAY_SECRETS_DIR | folder of secrets (/run/secrets): `api_keys`; `metrics_key` for Prometheus |
| ASSAY_LOG_FORMAT | json or text |
| STARTUP_BUDGET | seconds from start to an open door |
| ASSAY_BUILT_KERNELS | kernels that the image's build compiled |
| ASSAY_KERNEL_CACHE | where kernels are used from, and new ones are kept |
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import get_args

from assay_kernels.launcher import logfile
from assay_kernels.launcher.serve import serve
from assay_kernels.launcher.settings import LaunchError, Settings

SECRETS = ("api_keys", "metrics_key")
"""Keys that open the API, and the one that Prometheus sends: both are keys of the door."""


def settings(variables: Mapping[str, str], extra: tuple[str, ...]) -> Settings:
    """Raises LaunchError that names the variable and the rule."""
    echo = variables.get("ASSAY_LOG_FORMAT") or "json"
    if echo not in get_args(logfile.Echo):
        raise LaunchError(f"ASSAY_LOG_FORMAT={echo!r}: must be json or text", 2)
    model = variables.get("ASSAY_MODEL", "")
    if not model:
        raise LaunchError("ASSAY_MODEL is not set: the folder of the checkpoint", 2)
    return Settings(
        model=model,
        profile=profile(variables),
        host=variables.get("ASSAY_HOST") or "0.0.0.0",
        port=int(number(variables, "ASSAY_PORT", 8000)),
        extra=(*tracing(variables), *extra),
        state=Path(variables.get("ASSAY_STATE_DIR") or "/run/assay"),
        require=variables.get("ASSAY_REQUIRE", "1") != "0",
        start_seconds=number(variables, "STARTUP_BUDGET", 1800),
        echo="json" if echo == "json" else "text",
    )


def tracing(variables: Mapping[str, str]) -> tuple[str, ...]:
    """vLLM traces only where a flag names the collector, which OpenTelemetry's variable does."""
    endpoint = variables.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    return ("--otlp-traces-endpoint", endpoint) if endpoint else ()


def number(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise LaunchError(f"{name}={text!r}: must be a positive number", 2)
    return value


def profile(variables: Mapping[str, str]) -> Path:
    name = variables.get("ASSAY_PROFILE", "")
    folder = Path(variables.get("ASSAY_PROFILES") or "docker/profiles")
    path = Path(name) if "/" in name else folder / f"{name}.yaml"
    if not name or not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml"))) or "none"
        raise LaunchError(
            f"ASSAY_PROFILE={name!r} is no profile of {folder} ({known}) and no path of one", 2
        )
    return path


def take_secrets(variables: Mapping[str, str], state: Path) -> Path | None:
    """Copy the keys into one file that this uid alone can read, on tmpfs; None: there are none.

    A secret is mounted with the uid and mode of the file on the host, whatever compose was told, so
    that its reading can fail, and its mode says nothing. Raises LaunchError with what to do then.
    """
    folder = Path(variables.get("ASSAY_SECRETS_DIR") or "/run/secrets")
    lines = []
    for name in SECRETS:
        file = folder / name
        try:
            lines += file.read_text().splitlines()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise LaunchError(
                f"secret {file} cannot be read by uid {os.getuid()} ({reason}): on the host, set"
                " ASSAY_UID in .env to the uid that owns it, or give it group 0 and mode 0640",
                2,
            ) from error
    if not lines:
        return None
    target = state / "api_keys"
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        with os.fdopen(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as copy:
            copy.write("\n".join(lines) + "\n")
    except OSError as error:
        raise LaunchError(f"cannot keep the keys in {target}: {error.strerror}", 2) from error
    return target


def bring_kernels(variables: Mapping[str, str]) -> int:
    """Copy kernels that the image's build compiled to where more can be added; how many.

    The image is read-only, and a checkpoint of other sizes needs others. A copy appears whole or
    not at all. What cannot be copied is compiled at the start.
    """
    built, cache = variables.get("ASSAY_BUILT_KERNELS"), variables.get("ASSAY_KERNEL_CACHE")
    if not built or not cache or not Path(built).is_dir():
        return 0
    copied = 0
    for source in Path(built).rglob("*.o"):
        target = Path(cache) / source.relative_to(built)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, part)
                part.replace(target)
                copied += 1
        except OSError as error:
            print(f"warning: kernels of the image are not in {cache}: {error.strerror}", flush=True)
            with suppress(OSError):
                part.unlink(missing_ok=True)
            break
    return copied


def main() -> int:
    variables = dict(os.environ)
    if variables.get("ASSAY_LOG_FORMAT", "json") in ("", "json"):
        assert sys.__stdout__ is not None
        sys.stdout = logfile.JsonLines(sys.__stdout__)
        sys.stderr = logfile.JsonLines(sys.__stdout__, "ERROR")
    try:
        chosen = settings(variables, tuple(sys.argv[1:]))
        keys = take_secrets(variables, chosen.state)
        if keys is not None:
            os.environ["ASSAY_API_KEYS_FILE"] = str(keys)
        bring_kernels(variables)
        # vLLM's own patience must not end before the budget does.
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(chosen.start_seconds)))
        return serve(chosen)
    except LaunchError as error:
        print(f"assay: {error}", file=sys.stderr, flush=True)
        return error.code
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
