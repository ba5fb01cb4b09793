"""The command `assay-smoke`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from assay_smoke import __version__
from assay_smoke.client import Secrets
from assay_smoke.errors import CouldNotRunError
from assay_smoke.suite import TIERS, shipped

DEFAULT_URL = "http://127.0.0.1:8000"


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists what there is)\n")


def _server(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default=DEFAULT_URL, help="server (%(default)s)")
    command.add_argument("--model", default="", help="name of the model (default: the only one)")
    command.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="bearer key; or in $ASSAY_API_KEY. Not an argument: anyone can read those",
    )  # fmt: skip
    command.add_argument(
        "--bypass-key-file", type=Path, metavar="FILE",
        help="key that passes the closed door; or in $ASSAY_BYPASS_KEY",
    )  # fmt: skip


def _suite(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--suite", default="miniature", metavar="NAME|FILE",
        help=f"{', '.join(shipped())}, or a .yaml file (%(default)s)",
    )  # fmt: skip


def secrets(args: argparse.Namespace) -> Secrets:
    """Keys from files, else from the environment."""
    return Secrets(
        _key(args.api_key_file, "--api-key-file", "ASSAY_API_KEY"),
        _key(args.bypass_key_file, "--bypass-key-file", "ASSAY_BYPASS_KEY"),
    )


def _key(path: Path | None, flag: str, variable: str) -> str:
    """From the flag's file, the variable, or the file that VARIABLE_FILE names."""
    if path is None and not os.environ.get(variable) and os.environ.get(f"{variable}_FILE"):
        path, flag = Path(os.environ[f"{variable}_FILE"]), f"{variable}_FILE"
    if path is None:
        key = os.environ.get(variable, "")
    else:
        try:
            lines = path.read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CouldNotRunError(f"{flag} {path} cannot be read: {error}") from error
        key = next((s.strip() for s in lines if s.strip() and not s.startswith("#")), "")
        if not key:
            raise CouldNotRunError(f"{flag} {path} holds no key")
    if not key.isascii() or not key.isprintable():
        raise CouldNotRunError(f"{flag if path else variable}: a key is printable ASCII")
    return key


def _add_run(commands: Any) -> None:
    command = commands.add_parser(
        "run",
        help="ask a server a suite; exit 0 coherent, 1 not, 2 could not run",
        description="Exit 0: every check passed. 1: a check failed. 2: no verdict, because the"
        " server could not be reached, took too long or refused, or there were too few samples.",
    )
    _server(command)
    _suite(command)
    command.add_argument("--tier", choices=TIERS, default="default")
    command.add_argument("--seed", type=int, help="of what is drawn (default: drawn anew)")
    command.add_argument("--check", action="append", default=[], metavar="NAME", help="only these")
    command.add_argument(
        "--reference", type=Path, metavar="FILE", help="instead of the suite's own"
    )
    command.add_argument("--json", type=Path, metavar="FILE")
    command.add_argument("--junit", type=Path, metavar="FILE")
    command.add_argument("--markdown", type=Path, metavar="FILE")
    command.add_argument("--quiet", action="store_true", help="no progress, no table")
    command.add_argument(
        "--eval", metavar="gsm8k=FILE", help="score a local JSONL in place of the suite's checks"
    )
    command.add_argument("--shots", type=Path, metavar="FILE", help="worked examples for --eval")
    command.add_argument(
        "--eval-limit", type=int, metavar="N", help="only so many of its questions"
    )
    command.add_argument(
        "--eval-concurrency", type=int, default=16, metavar="N", help="(%(default)s)"
    )
    command.add_argument(
        "--eval-max-tokens", type=int, default=256, metavar="N", help="(%(default)s)"
    )
    command.add_argument(
        "--at-least", type=float, default=0.92, metavar="SHARE",
        help="of right answers (%(default)s: vLLM's own for DeepSeek V4)",
    )  # fmt: skip
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from assay_smoke import evaluate, reference, report, suite
    from assay_smoke.battery import Battery, Plan

    chosen = suite.load(args.suite)
    path = args.reference or chosen.reference
    recorded = None if path is None else reference.read(path, chosen)
    plan = Plan(
        chosen, args.tier, args.url, args.model, secrets(args), args.seed, recorded,
        tuple(args.check),
    )  # fmt: skip
    terminal = report.Terminal(quiet=args.quiet)
    if args.eval is None:
        found = asyncio.run(Battery(plan, terminal).run())
    else:
        found = asyncio.run(evaluate.run(plan, _task(args), terminal))
    terminal.clear()
    if not args.quiet:
        print(report.table(found), flush=True)
    elif found.verdict != "pass":
        reasons = [f"{r.name}: {r.outcome.reason}" for r in found.results
                   if r.outcome.verdict not in ("pass", "skip")]  # fmt: skip
        print(f"assay-smoke: {found.verdict}: {found.error or '; '.join(reasons)}", file=sys.stderr)
    for target, write in (
        (args.json, report.write_json),
        (args.junit, report.write_junit),
        (args.markdown, report.write_markdown),
    ):
        if target is not None:
            write(found, target)
    return found.exit_code


def _add_record(commands: Any) -> None:
    command = commands.add_parser(
        "record", help="write a trusted server's log-probabilities of a suite's passages"
    )
    _server(command)
    _suite(command)
    command.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help=".json or .json.gz"
    )
    command.set_defaults(run=_record)


def _record(args: argparse.Namespace) -> int:
    from assay_smoke import reference, suite
    from assay_smoke.client import Client

    chosen = suite.load(args.suite)

    async def ask() -> reference.Reference:
        async with Client(args.url, model=args.model, secrets=secrets(args)) as client:
            await client.find_model()
            return await reference.record(client, chosen)

    recorded = asyncio.run(ask())
    reference.write(recorded, args.out)
    positions = sum(len(text.ids) for text in recorded.texts)
    print(f"{args.out}: {len(recorded.texts)} texts, {positions} positions of {recorded.model}")
    return 0


def _task(args: argparse.Namespace) -> Any:
    from assay_smoke import evaluate

    name, _, path = args.eval.partition("=")
    if name != "gsm8k" or not path:
        raise CouldNotRunError(f"--eval {args.eval}: must be gsm8k=FILE")
    if not 0 < args.at_least < 1:
        raise CouldNotRunError("--at-least must be between 0 and 1")
    for flag in ("eval_limit", "eval_concurrency", "eval_max_tokens"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise CouldNotRunError(f"--{flag.replace('_', '-')} must be at least 1")
    return evaluate.read(
        Path(path), args.shots, args.at_least, args.eval_limit, args.eval_concurrency,
        args.eval_max_tokens,
    )  # fmt: skip


def _add_watch(commands: Any) -> None:
    command = commands.add_parser(
        "watch",
        help="the canary: open the door, keep probing, serve /readyz, /healthz and /metrics",
        description="The door opens when the ready tier has passed. --fail-after incoherent probes"
        " in a row close it, --recover-after passes of the ready tier open it again. Outages never"
        " touch it, nor does the canary's own end.",
    )
    _server(command)
    _suite(command)
    command.add_argument(
        "--reference", type=Path, metavar="FILE", help="instead of the suite's own"
    )
    command.add_argument("--door", type=Path, metavar="DIR", help="run folder of the server")
    command.add_argument(
        "--never-close", action="store_true", help="open the door, but never close it"
    )
    command.add_argument(
        "--listen", default="127.0.0.1:8090", metavar="HOST:PORT", help="(%(default)s)"
    )
    for flag, default, text in (
        ("--interval", 60.0, "seconds between probes"),
        ("--retry", 10.0, "seconds to the next after one that did not pass"),
        ("--jitter", 0.2, "share by which that varies"),
        ("--stalled-after", 60.0, "seconds without a step, with requests running"),
    ):
        command.add_argument(flag, type=float, default=default, help=f"{text} (%(default)s)")
    for flag, default, text in (
        ("--tokens-per-hour", 9000, "generated tokens that probes may cost"),
        ("--fail-after", 3, "incoherent probes in a row that close the door"),
        ("--recover-after", 2, "passes in a row that open it again"),
        ("--outage-after", 3, "unanswered probes in a row after which /readyz says no"),
    ):
        command.add_argument(flag, type=int, default=default, help=f"{text} (%(default)s)")
    command.set_defaults(run=_watch)


def _watch(args: argparse.Namespace) -> int:
    from assay_smoke import reference, suite
    from assay_smoke.battery import Plan
    from assay_smoke.watch.canary import PROBE, READY, Canary, Settings
    from assay_smoke.watch.door import Door
    from assay_smoke.watch.policy import Policy

    chosen = suite.load(args.suite)
    for tier in (PROBE, READY):
        chosen.tier(tier)
    path = args.reference or chosen.reference
    host, _, port = args.listen.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise CouldNotRunError(f"--listen {args.listen}: must be HOST:PORT")
    for flag, least in (
        ("interval", 0.1),
        ("retry", 0.1),
        ("stalled_after", 1),
        ("tokens_per_hour", 1),
    ):
        if not getattr(args, flag) >= least:
            raise CouldNotRunError(f"--{flag.replace('_', '-')} must be at least {least}")
    if not 0 <= args.jitter < 1:
        raise CouldNotRunError("--jitter must be at least 0 and below 1")
    try:
        policy = Policy(
            args.fail_after, args.recover_after, args.outage_after, not args.never_close
        )
    except ValueError as error:
        raise CouldNotRunError(f"--{str(error).replace('_', '-')}") from error
    settings = Settings(
        Plan(
            chosen, PROBE, args.url, args.model, secrets(args),
            reference=None if path is None else reference.read(path, chosen),
        ),
        Door(args.door), policy, args.interval, args.retry, args.jitter, args.tokens_per_hour,
        stalled_after=args.stalled_after, host=host.strip("[]"), port=int(port),
    )  # fmt: skip
    return asyncio.run(Canary(settings).run())


def _add_checks(commands: Any) -> None:
    command = commands.add_parser("checks", help="list the checks and why each is there")
    command.set_defaults(run=_checks)


def _checks(_: argparse.Namespace) -> int:
    from assay_smoke.checks import REGISTRY

    for name, check in sorted(REGISTRY.items()):
        print(f"{name} ({check.stage})\n    " + check.why().replace("\n", "\n    ") + "\n")
    return 0


def _add_fault_server(commands: Any) -> None:
    command = commands.add_parser(
        "fault-server",
        help="serve a suite's answers, spoiled in one way: see the gate bite",
        description="`assay-smoke faults` lists the modes, their parameters and what catches them.",
    )
    _suite(command)
    command.add_argument("--mode", default="good")
    command.add_argument("--seed", type=int, help="default: drawn anew, and printed")
    command.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="default: drawn"
    )
    command.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    command.add_argument("--port", type=int, default=8001, help="(%(default)s); 0: any")
    command.set_defaults(run=_fault_server)


def _fault_server(args: argparse.Namespace) -> int:
    import random

    import yaml

    from assay_smoke import suite
    from assay_smoke.faults import modes
    from assay_smoke.faults.server import FaultServer, Running

    parameters = {}
    for pair in args.param:
        name, equals, value = pair.partition("=")
        if not equals:
            raise CouldNotRunError(f"--param {pair}: must be NAME=VALUE")
        parameters[name] = yaml.safe_load(value)
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    mode = modes.build(args.mode, parameters, seed)
    server = FaultServer(suite.load(args.suite), mode)
    try:
        running = Running(server, args.host, args.port)
    except OSError as error:
        raise CouldNotRunError(f"cannot listen on {args.host}:{args.port}: {error}") from error

    async def serve() -> None:
        async with running as url:
            shown = ", ".join(f"{k}={v}" for k, v in mode.params.model_dump().items())
            print(
                f"{url}  mode {args.mode}, seed {seed}" + (f", {shown}" if shown else ""),
                flush=True,
            )
            await running.finished()

    asyncio.run(serve())
    return 0


def _add_faults(commands: Any) -> None:
    command = commands.add_parser(
        "faults", help="list the fault server's modes and what catches each"
    )
    command.set_defaults(run=_faults)


def _faults(_: argparse.Namespace) -> int:
    from assay_smoke.faults.modes import MODES

    for name, mode in MODES.items():
        caught = ", ".join(mode.meant) or ("nothing" if name == "good" else "exit code 2")
        fields = ", ".join(f"{k}={f.default}" for k, f in mode.Params.model_fields.items())
        print(f"{name} ({fields}): {caught}\n    " + mode.why().replace("\n", "\n    ") + "\n")
    return 0


def _add_detection(commands: Any) -> None:
    command = commands.add_parser(
        "detection", help="run the battery on every fault, drawn anew; print how often it is caught"
    )
    _suite(command)
    command.add_argument("--draws", type=int, default=20, help="of each fault (%(default)s)")
    command.add_argument("--good", type=int, default=100, help="of the good mode (%(default)s)")
    command.add_argument("--mode", action="append", default=[], metavar="NAME", help="only these")
    command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    command.add_argument("--seed", type=int, help="default: drawn anew")
    command.add_argument("--out", type=Path, metavar="FILE", help="every run as JSON")
    command.add_argument("--docs", type=Path, metavar="FILE", help="Markdown to put the table into")
    command.set_defaults(run=_detection)


def _detection(args: argparse.Namespace) -> int:
    from assay_smoke import detection, report

    rows = []
    found = detection.run(
        args.suite, args.draws, args.good, args.mode, max(1, args.jobs), args.seed
    )
    for row in found:
        print(detection.words(row), flush=True)
        for draw in row.draws:
            if not draw.caught:
                print(
                    f"    seed {draw.seed}, {draw.params}: {draw.verdict} {draw.failed}", flush=True
                )
        rows.append(row)
        if args.out is not None:
            report.files.write(args.out, detection.to_json(rows))
    if args.docs is not None:
        detection.into_document(args.docs, rows)
    return 0 if all(row.caught == len(row.draws) for row in rows) else 1


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="assay-smoke", description=__doc__)
    top.add_argument("--version", action="version", version=f"assay-smoke {__version__}")
    commands = top.add_subparsers(required=True, parser_class=_Parser, metavar="COMMAND")
    add: list[Callable[[Any], None]] = [
        _add_run, _add_watch, _add_record, _add_checks, _add_fault_server, _add_faults,
        _add_detection,
    ]  # fmt: skip
    for one in add:
        one(commands)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except CouldNotRunError as error:
        print(f"assay-smoke: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except Exception:  # Python's own exit code for it is 1, which here means incoherent
        traceback.print_exc()
        return 2
    except KeyboardInterrupt:
        print("assay-smoke: interrupted", file=sys.stderr)
        return 130
    return code
