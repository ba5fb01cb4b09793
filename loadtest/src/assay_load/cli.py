"""`assay-load`: run workloads, compare results, and the tools around them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from assay_load import __version__, outputs
from assay_load.errors import InputError, TargetError


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        # As Ctrl-C: what was measured is kept.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        code: int = options.do(options)
    except (InputError, TargetError) as error:
        print(f"assay-load: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("assay-load: interrupted before anything was measured", file=sys.stderr)
        return 2
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="assay-load", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="run a workload; exit 0 well, 1 requests failed, 2 incomplete or not run"
    )
    run.add_argument("workload", help="name of a shipped workload, or path of a .yaml")
    run.add_argument("--url", required=True, help="the server, http://host:port")
    run.add_argument("--scale", help="one of the workload's scales: miniature")
    run.add_argument("--model", help="the model to ask for (default: the first served)")
    run.add_argument("--out", type=Path, required=True, help="folder for the results")
    run.add_argument("--repeat", type=int, default=1, help="runs, each in a folder of its own")
    run.add_argument("--processes", type=int, default=1, help="worker processes (Locust's)")
    run.add_argument("--raw", help="file for one JSON line a request")
    run.add_argument("--metrics-url", help="the server's Prometheus page (default: URL/metrics)")
    run.add_argument("--gpus", type=int, default=0, help="GPUs of the server, for the cost")
    run.add_argument("--gpu-hour-price", type=float, help="price of a GPU hour")
    run.add_argument("--token-ids", action="store_true", help="check counts by token ids (vLLM)")
    run.set_defaults(do=do_run)

    compare = commands.add_parser(
        "compare", help="is B slower than A? exit 0 no, 1 yes, 2 cannot tell"
    )
    compare.add_argument("a", type=Path, help="result file, or folder with repeated runs")
    compare.add_argument("b", type=Path)
    compare.add_argument("--margin", type=float, default=0.05, help="slow-down that is let pass")
    compare.add_argument("--json", type=Path, help="write the table as JSON too")
    compare.set_defaults(do=do_compare)

    report = commands.add_parser("report", help="make the HTML, plots and Markdown of a result")
    report.add_argument("result", type=Path)
    report.set_defaults(do=do_report)

    listing = commands.add_parser("workloads", help="list the shipped workloads")
    listing.set_defaults(do=do_workloads)

    schema = commands.add_parser("schema", help="print the JSON schema of results")
    schema.set_defaults(do=do_schema)

    paced = commands.add_parser("paced", help="test tool: a server with a known pace")
    add_paced(paced)
    faulty = commands.add_parser("faulty", help="test tool: a proxy that adds faults to a server")
    add_faulty(faulty)
    return parser


def do_run(options: argparse.Namespace) -> int:
    outputs.folder(options.out, "--out")
    if options.raw is not None:
        outputs.file(Path(options.raw), "--raw")
    if options.processes > 1:
        return run_distributed(options)
    from assay_load.drive.run import run
    from assay_load.drive.settings import Settings
    from assay_load.report import markdown
    from assay_load.report.files import write_all

    if options.repeat < 1:
        raise InputError("--repeat: at least 1")
    settings = Settings.of(
        options.url,
        options.workload,
        options.scale or None,
        model=options.model,
        token_ids=options.token_ids,
        raw=options.raw,
        metrics_url=options.metrics_url,
        gpus=options.gpus,
        gpu_hour_price=options.gpu_hour_price,
    )
    worst = 0
    for number in range(1, options.repeat + 1):
        folder = options.out if options.repeat == 1 else options.out / f"run-{number}"
        result = run(settings)
        print(markdown.summary(result))
        print(f"written: {write_all(result, folder)}", flush=True)
        worst = max(worst, 2 if not result.complete else 1 if result.failed else 0)
        if not result.complete:
            break
    return worst


def run_distributed(options: argparse.Namespace) -> int:
    """Locust's own processes, by Locust's own command line."""
    if options.repeat != 1:
        raise InputError("--repeat: not together with --processes")
    locustfile = Path(__file__).parent / "drive" / "locustfile.py"
    command = [
        sys.executable, "-m", "locust", "-f", str(locustfile), "--headless", "--only-summary",
        "--host", options.url, "--processes", str(options.processes),
        "--workload", options.workload, "--out", str(options.out),
    ]  # fmt: skip
    for flag in ("scale", "model", "raw", "metrics_url", "gpus", "gpu_hour_price"):
        if value := getattr(options, flag):
            command += [f"--{flag.replace('_', '-')}", str(value)]
    if options.token_ids:
        command.append("--token-ids")
    os.execv(sys.executable, command)


def do_compare(options: argparse.Namespace) -> int:
    from assay_load.report.compare import compare

    if options.json is not None:
        outputs.file(options.json, "--json")
    return compare(options.a, options.b, options.margin, options.json)


def do_report(options: argparse.Namespace) -> int:
    from assay_load.report.files import write_all
    from assay_load.report.result import read

    print(f"written: {write_all(read(options.result), options.result.parent)}")
    return 0


def do_workloads(_: argparse.Namespace) -> int:
    from assay_load.workload.schema import load, shipped

    for name, path in shipped().items():
        workload = load(name)
        print(f"{name:20} {workload.about}\n{'':20} {path}")
    return 0


def do_schema(_: argparse.Namespace) -> int:
    from assay_load.report.schema import result_schema

    print(result_schema(), end="")
    return 0


def add_paced(parser: argparse.ArgumentParser) -> None:
    from assay_load.paced.server import Pace

    pace = Pace()
    add_address(parser)
    parser.add_argument("--ttft", type=float, default=pace.ttft, help="seconds to the first token")
    parser.add_argument("--rate", type=float, default=pace.rate, help="tokens/s of each stream")
    parser.add_argument("--slow", type=float, default=1.0, help="factor on every wait")
    parser.add_argument("--jitter", type=float, default=0.0, help="noise of each wait")
    parser.add_argument("--drift", type=float, default=0.0, help="noise that streams share")
    parser.add_argument("--run-noise", type=float, default=0.0, help="noise from run to run")
    parser.add_argument("--slots", type=int, default=0, help="streams at a time; 0: any number")
    parser.add_argument("--model", default=pace.model)
    parser.add_argument("--seed", type=int, default=1)

    def do(options: argparse.Namespace) -> int:
        from assay_load.paced import server

        fields: Any = {k: getattr(options, k) for k in Pace.__dataclass_fields__}
        return server.main(Pace(**fields), options.host, options.port)

    parser.set_defaults(do=do)


def add_faulty(parser: argparse.ArgumentParser) -> None:
    from assay_load.paced.proxy import Faults

    add_address(parser)
    parser.add_argument("--upstream", required=True, help="the server behind, http://host:port")
    parser.add_argument("--load-upstream", default="", help="another one for load tests' requests")
    parser.add_argument("--slow", type=float, default=1.0, help="factor on every wait")
    parser.add_argument("--drop-every", type=int, default=0, help="cut every n-th stream short")
    parser.add_argument("--restart-after", type=int, default=0, help="restart after n completions")
    beside = "garble text of streams that run beside more than n others"
    parser.add_argument("--corrupt-above", type=int, default=-1, help=beside)
    parser.add_argument("--garble", action="store_true", help="garble the text of every answer")
    parser.add_argument("--model", default="", help="another name for the model")

    def do(options: argparse.Namespace) -> int:
        from assay_load.paced import proxy

        fields: Any = {k: getattr(options, k) for k in Faults.__dataclass_fields__}
        address = options.host, options.port
        upstreams = options.upstream, options.load_upstream
        return proxy.main(Faults(**fields), *upstreams, *address)

    parser.set_defaults(do=do)


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)


if __name__ == "__main__":
    sys.exit(main())
