"""The command `assay-kernels`."""

import argparse
import os
import sys
from pathlib import Path

from assay_kernels import __version__
from assay_kernels.launcher.serve import LaunchError, Settings, serve

PROFILE = Path("docker/profiles/miniature-cpu.yaml")
MINIATURE = Path("models/miniature/checkpoint")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="assay-kernels", description=__doc__)
    top.add_argument("--version", action="version", version=f"assay-kernels {__version__}")
    commands = top.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "serve",
        help="start vLLM with the plugin; serve once every process has proven it",
        description="Everything after -- goes to `vllm serve`. ASSAY_REQUIRE=0 only warns when a"
        " process runs without the plugin.",
    )
    command.add_argument("model", nargs="?", default=str(MINIATURE), help=f"default: {MINIATURE}")
    command.add_argument("--config", type=Path, default=PROFILE, help=f"default: {PROFILE}")
    command.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    command.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    command.add_argument(
        "--state-dir", type=Path, default=Path(".assay"), help="log and run files (%(default)s)"
    )
    command.add_argument(
        "--start-timeout", type=float, default=1800, metavar="SECONDS", help="default: %(default)s"
    )
    return top


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    extra: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, extra = arguments[:split], arguments[split + 1 :]
    options = parser().parse_args(arguments)
    require = os.environ.get("ASSAY_REQUIRE", "1")
    if require not in ("0", "1"):
        print(f"assay-kernels: ASSAY_REQUIRE is 0 or 1, not {require!r}", file=sys.stderr)
        return 2
    settings = Settings(
        model=options.model,
        profile=options.config,
        host=options.host,
        port=options.port,
        extra=tuple(extra),
        state=options.state_dir,
        require=require == "1",
        start_seconds=options.start_timeout,
    )
    try:
        return serve(settings)
    except LaunchError as error:
        print(f"assay-kernels: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
