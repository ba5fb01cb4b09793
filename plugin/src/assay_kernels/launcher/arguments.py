"""What a caller and a profile may say to `vllm serve`, and what only the launcher says."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

INSTEAD = {
    "--host": "the launcher's own --host (make: HOST=...)",
    "--port": "the launcher's own --port (make: PORT=...)",
    "--uds": "",
    "--ssl-keyfile": "a proxy in front for TLS",
    "--ssl-certfile": "a proxy in front for TLS",
    "--ssl-ca-certs": "a proxy in front for TLS",
    "--ssl-cert-reqs": "a proxy in front for TLS",
    "--ssl-ciphers": "a proxy in front for TLS",
    "--enable-ssl-refresh": "a proxy in front for TLS",
    "--grpc": "",
    "--grpc-port": "",
    "--headless": "",
    "--middleware": "",
    "--data-parallel-multi-port-external-lb": "",
}
"""Flags that would lead clients past the closed door, or the launcher to another socket -> what to
use in their place."""


def flag(argument: str) -> str:
    """`--tensor_parallel_size=2` -> `--tensor-parallel-size`, as vLLM's parser reads it."""
    return argument.partition("=")[0].replace("_", "-")


def refused(argument: str) -> str | None:
    """The flag that an argument gives or abbreviates, if it is the launcher's alone."""
    name = flag(argument)
    if len(name) < 4 or not name.startswith("--"):
        return None
    return next((f for f in sorted(INSTEAD, key=len) if f.startswith(name)), None)


def obstacle(extra: Sequence[str], profile: Mapping[str, Any]) -> str | None:
    """Why these arguments are refused, in one line; None when they are not."""
    sources = [("after --", extra), ("in the profile", [f"--{key}" for key in profile])]
    for where, arguments in sources:
        for argument in arguments:
            if (name := refused(argument)) is not None:
                instead = f"; use {INSTEAD[name]}" if INSTEAD[name] else ""
                return f"{name} {where} would bypass the closed door{instead}"
    return None


_RANKS = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
}


def ranks(extra: Sequence[str], profile: Mapping[str, Any]) -> int:
    """Number of workers that vLLM will start on this machine.

    Of several nodes each has its part of the data parallel ranks: `data-parallel-size-local`.
    """
    sizes = given(extra, profile)
    if "--data-parallel-size-local" in sizes:
        sizes["--data-parallel-size"] = sizes["--data-parallel-size-local"]
    return _product(sizes)


def all_ranks(extra: Sequence[str], profile: Mapping[str, Any]) -> int:
    """Number of workers on all nodes: what experts are spread over."""
    return _product(given(extra, profile))


def _product(sizes: Mapping[str, str]) -> int:
    """A size that is no number counts as 1."""
    number = 1
    for name in _RANKS:
        size = sizes.get(f"--{name}", "1")
        number *= int(size) if size.isdigit() else 1
    return number


def given(extra: Sequence[str], profile: Mapping[str, Any]) -> dict[str, str]:
    """flag -> its value as vLLM will take it: an argument wins over the profile."""
    found = {f"--{key}".replace("_", "-"): str(value) for key, value in profile.items()}
    return found | dict(_valued(extra))


def _valued(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for argument, following in pairwise([*arguments, ""]):
        if argument.startswith("-"):
            name = _SHORT.get(flag(argument), flag(argument))
            yield name, argument.partition("=")[2] or following
