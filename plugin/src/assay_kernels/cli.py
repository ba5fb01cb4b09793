"""The command `assay-kernels`."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from assay_kernels import __version__
from assay_kernels.launcher.serve import serve
from assay_kernels.launcher.settings import LaunchError, Settings

PROFILE = Path("docker/profiles/miniature-cpu.yaml")
MINIATURE = Path("models/miniature/checkpoint")

_MEGABYTE = 2**20


class _Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists what there is)\n")


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be positive")
    return value


def _add_serve(commands: Any) -> None:
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


class _ListRules(argparse.Action):
    """Prints every rule and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from assay_kernels.audit import all_rules, render

        print(render.rule_table(all_rules().values()))
        parser.exit(0)


def _add_audit(commands: Any) -> None:
    command = commands.add_parser(
        "audit",
        help="say what in a checkpoint will turn the output to garbage",
        description="Exit 0: nothing, or warnings only. 1: faults. 2: could not be read.",
    )
    command.add_argument("directory", type=Path)
    command.add_argument("--rules", action=_ListRules, nargs=0, help="list what is looked for")
    command.add_argument("--deep", action="store_true", help="read all scales and sample the codes")
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    command.add_argument("--all", action="store_true", help="do not shorten lists of like findings")
    command.add_argument("--jobs", type=_size, help="threads (default: one a CPU)")


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser(
        "inspect", help="component by component: dtype, kernel, bytes; does it fit the GPUs"
    )
    command.add_argument("directory", type=Path)
    command.add_argument("--arch", choices=("sm_100", "sm_90", "cpu"), default="sm_100")
    command.add_argument("--gpus", type=_size, default=8, help="default: %(default)s")
    command.add_argument(
        "--gpu-memory", type=_positive, default=192, metavar="GB", help="each; default: %(default)s"
    )
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _add_convert(commands: Any) -> None:
    command = commands.add_parser(
        "convert",
        help="write a checkpoint as another dialect; goes on where a killed run stopped",
        description="From the native format, A, B, C or bf16. SRC is only read. Exit 0: done."
        " 1: SRC has faults. 2: could not begin.",
    )
    command.add_argument("source", type=Path, metavar="SRC")
    command.add_argument("destination", type=Path, metavar="DST")
    command.add_argument("--to", required=True, choices=("A", "B", "C", "bf16"))
    command.add_argument(
        "--calibrate",
        type=Path,
        metavar="PROMPTS",
        help="run the model on these prompts (a line each: text, or JSON with text or token ids)"
        " and record input scales; without it they are taken from SRC, or marked dynamic",
    )
    command.add_argument(
        "--shard-megabytes", type=_size, default=4096, metavar="MB", help="default: %(default)s"
    )
    command.add_argument("--jobs", type=_size, help="shards at a time (default: one a CPU)")


def _add_first_contact(commands: Any) -> None:
    command = commands.add_parser(
        "first-contact",
        help="the first run on a GPU: is every kernel right, how fast, one JSON to send back",
        description="Exit 0: everything that was asked for passed. 1: something failed. 2: could"
        " not run. Without a GPU the CPU kernels stand in.",
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object here")
    command.add_argument("--json", action="store_true", help="print it instead of text")
    command.add_argument("--quick", action="store_true", help="small shapes, few boundaries")
    command.add_argument(
        "--skip", action="append", default=[], choices=("correctness", "speed", "sanitizer")
    )


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="assay-kernels", description=__doc__)
    top.add_argument("--version", action="version", version=f"assay-kernels {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    for add in (_add_serve, _add_audit, _add_inspect, _add_convert, _add_first_contact):
        add(commands)
    return top


def _say(message: object) -> None:
    print(f"assay-kernels: {message}", file=sys.stderr)


def _serve(options: argparse.Namespace, extra: tuple[str, ...]) -> int:
    require = os.environ.get("ASSAY_REQUIRE", "1")
    if require not in ("0", "1"):
        _say(f"ASSAY_REQUIRE is 0 or 1, not {require!r}")
        return 2
    settings = Settings(
        model=options.model,
        profile=options.config,
        host=options.host,
        port=options.port,
        extra=extra,
        state=options.state_dir,
        require=require == "1",
        start_seconds=options.start_timeout,
    )
    try:
        return serve(settings)
    except LaunchError as error:
        _say(error)
        return error.code


def _audit(options: argparse.Namespace) -> int:
    from assay_kernels.audit import audit, render

    report = audit(options.directory, deep=options.deep, jobs=options.jobs)
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(render.text(report, everything=options.all))
    return report.exit_code


def _inspect(options: argparse.Namespace) -> int:
    from assay_kernels import inspection
    from assay_kernels.checkpoint import open_checkpoint

    found = inspection.inspect(
        open_checkpoint(options.directory),
        architecture=options.arch,
        gpus=options.gpus,
        gigabytes=options.gpu_memory,
    )
    print(json.dumps(found.as_json(), indent=2) if options.json else inspection.text(found))
    return 0


def _convert(options: argparse.Namespace) -> int:
    from assay_kernels.checkpoint import Checkpoint, CheckpointError, Dialect
    from assay_kernels.checkpoint.errors import Fault
    from assay_kernels.convert import ConversionError, convert, render
    from assay_kernels.convert.calibrate import PromptsError, activation_maxima, read_prompts

    def calibrate(checkpoint: Checkpoint) -> Any:
        vocabulary = checkpoint.config.vocab_size
        prompts = read_prompts(options.calibrate, checkpoint.directory, vocabulary)
        return activation_maxima(checkpoint, prompts, Dialect(options.to))

    try:
        outcome = convert(
            options.source,
            options.destination,
            Dialect(options.to),
            shard_bytes=options.shard_megabytes * _MEGABYTE,
            calibrate=calibrate if options.calibrate else None,
            jobs=options.jobs,
        )
    except (ConversionError, FileExistsError, PromptsError) as error:
        _say(error)
        return 2
    except CheckpointError as error:
        _say(f"{options.source}: {error}")
        return 2 if error.fault in (Fault.UNREADABLE, Fault.HEADER, Fault.INDEX) else 1
    print(render(outcome))
    return 0


def _first_contact(options: argparse.Namespace) -> int:
    # It takes minutes on somebody's GPU: a misspelt folder is said before, and nothing is lost.
    if options.out and not options.out.absolute().parent.is_dir():
        _say(f"first-contact: --out {options.out}: there is no such folder")
        return 2
    from assay_kernels.checkpoint.writer import write_json
    from assay_kernels.first_contact import Options, first_contact, text
    from assay_kernels.kernels.objects import CompilerMissingError

    try:
        report = first_contact(Options(options.quick, tuple(options.skip)), _say)
    except (ValueError, CompilerMissingError) as error:
        _say(error)
        return 2
    print(json.dumps(report, indent=2) if options.json else text(report))
    if options.out:
        try:
            write_json(options.out, report)
        except OSError as error:
            _say(f"first-contact: cannot write {options.out}: {error.strerror}; its content:")
            _say(json.dumps(report))
            return 2
    return 0 if report["passed"] else 1


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    extra: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, extra = arguments[:split], arguments[split + 1 :]
    options = parser().parse_args(arguments)
    if options.command == "serve":
        return _serve(options, tuple(extra))
    from assay_kernels.checkpoint import CheckpointError

    if extra:
        _say(f"{options.command} takes nothing after --")
        return 2
    if options.command == "first-contact":
        return _first_contact(options)
    run: dict[str, Callable[[argparse.Namespace], int]] = {
        "audit": _audit,
        "inspect": _inspect,
        "convert": _convert,
    }
    directory = getattr(options, "directory", None) or options.source
    if not directory.is_dir():
        _say(f"{directory} is not a directory")
        return 2
    try:
        return run[options.command](options)
    except CheckpointError as error:
        _say(f"{directory}: {error}")
        return 2
    except OSError as error:
        _say(f"{error.filename or options.command}: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        again = "; the same command goes on from here" if options.command == "convert" else ""
        _say(f"interrupted{again}")
        return 130


if __name__ == "__main__":
    sys.exit(main())
