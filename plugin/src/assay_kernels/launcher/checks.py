"""What cannot work is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

from assay_kernels.launcher import arguments, host, preflight, ready
from assay_kernels.launcher.settings import LaunchError, Settings, stalled_after
from assay_kernels.settings import (
    arithmetic,
    cpu_operators,
    kernels,
    on_mismatch,
    selfcheck_timeout,
)
from assay_kernels.vllm_plugin import door


def check(settings: Settings) -> None:
    """Refuse what cannot work before anything is started."""
    if (obstacle := host.Cpu.here().obstacle()) is not None:
        raise LaunchError(obstacle, 2)
    if not settings.profile.is_file():
        raise LaunchError(f"there is no profile {settings.profile}", 2)
    if (obstacle := arguments.obstacle(settings.extra, settings.flags)) is not None:
        raise LaunchError(obstacle, 2)
    folder = Path(settings.model)
    looks_local = folder.exists() or settings.model.startswith((".", "/", "models/"))
    if looks_local and not (folder / "config.json").is_file():
        raise LaunchError(f"{settings.model} holds no checkpoint (no config.json)", 2)
    if looks_local and not (folder / "tokenizer.json").is_file():
        raise LaunchError(f"{settings.model} has no tokenizer (no tokenizer.json)", 2)
    if settings.require and (left_out := settings.left_out_by) is not None:
        raise LaunchError(f"{left_out}, so vLLM would not load it", 2)
    if (obstacle := ready.obstacle(settings.variables)) is not None:
        raise LaunchError(obstacle, 2)
    if keys := settings.keys_file:
        try:
            if not door.read_keys(Path(keys)):
                raise LaunchError(f"ASSAY_API_KEYS_FILE {keys} holds no key", 2)
        except door.KeysError as error:
            raise LaunchError(f"ASSAY_API_KEYS_FILE {error}", 2) from error
    if not 0 < settings.port < 65536:
        raise LaunchError(f"--port {settings.port}: must be between 1 and 65535", 2)
    if (obstacle := host.port_obstacle(settings.host, settings.port)) is not None:
        raise LaunchError(obstacle, 2)
    try:
        for read in (
            stalled_after,
            arithmetic,
            cpu_operators,
            kernels,
            on_mismatch,
            selfcheck_timeout,
        ):
            read(settings.variables)
    except ValueError as error:
        raise LaunchError(str(error), 2) from error
    wish = wished(settings)
    machine = preflight.Machine.here(settings.cache_folder, wish.place == "gpu")
    obstacles = preflight.obstacles(wish, machine)
    if not obstacles and settings.require and is_deepseek_v4(settings):
        check_headers(folder)
        obstacles = preflight.model_obstacles(wish, machine, folder)
    if obstacles:
        raise LaunchError("\n".join(obstacles), 2)
    for warning in preflight.warnings(wish, machine):
        print(f"warning: {warning}", flush=True)


def wished(settings: Settings) -> preflight.Wish:
    """What the profile and its variables ask of the machine."""
    profile, given = settings.flags, settings.variables
    arch = given.get("ASSAY_ARCH", "cpu")
    if arch not in ("cpu", *preflight.CAPABILITIES):
        known = ", ".join(("cpu", *preflight.CAPABILITIES))
        raise LaunchError(f"ASSAY_ARCH={arch!r}: must be one of {known}", 2)
    ranks = arguments.ranks(settings.extra, profile)
    everywhere = arguments.all_ranks(settings.extra, profile)
    variant = given.get("ASSAY_CUDA_VARIANT", "")
    return preflight.Wish(settings.profile.stem, arch, ranks, profile, variant, everywhere)


def is_deepseek_v4(settings: Settings) -> bool:
    return (settings.checkpoint or {}).get("model_type") == "deepseek_v4"


def check_headers(folder: Path) -> None:
    """Read the checkpoint's headers as every vLLM process will: a second here, not a minute there.

    `assay-kernels audit` finds more; this is what the plugin would refuse to load.
    """
    from assay_kernels.checkpoint import CheckpointError, open_checkpoint

    try:
        open_checkpoint(folder)
    except CheckpointError as error:
        raise LaunchError(str(error), 2) from error
