"""`assay-gate`: may this release go out? Exit 0 it may, 1 it may not, 2 the run says nothing."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from assay_load import __version__, outputs
from assay_load.errors import InputError, TargetError

if TYPE_CHECKING:
    from assay_load.gate.run import Options


def main(argv: list[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    try:
        code: int = options.do(options)
    except (InputError, TargetError) as error:
        print(f"assay-gate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("assay-gate: interrupted, no verdict", file=sys.stderr)
        return 2
    except Exception:  # a fault of the gate must never look like a verdict
        print("assay-gate: no verdict:", file=sys.stderr)
        traceback.print_exc()
        return 2
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="assay-gate", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="judge a server by a policy and a baseline")
    add_common(run)
    run.add_argument("--baseline", type=Path, help="file that `assay-gate baseline` wrote")
    run.add_argument("--out", type=Path, required=True, help="folder for verdict and results")
    run.set_defaults(do=do_run)
    baseline = commands.add_parser("baseline", help="measure a good server and write a baseline")
    add_common(baseline)
    baseline.add_argument("--out", type=Path, required=True, help="folder for the results")
    baseline.add_argument("--write", type=Path, required=True, help="the baseline file")
    baseline.add_argument("--repetitions", type=int, help="default: the policy's and two more")
    baseline.set_defaults(do=do_baseline)
    listing = commands.add_parser("policies", help="list the shipped policies")
    listing.set_defaults(do=do_policies)
    schema = commands.add_parser("schema", help="print the JSON schema of verdicts")
    schema.set_defaults(do=do_schema)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", required=True, help="shipped policy, or path of a .yaml")
    parser.add_argument("--url", required=True, help="the server, http://host:port")
    parser.add_argument("--hardware", help="the server's hardware, where it cannot be seen")
    parser.add_argument("--image", help="the image under test (default: $ASSAY_IMAGE)")
    parser.add_argument(
        "--model-revision", help="the model's revision (default: $ASSAY_MODEL_REVISION)"
    )
    parser.add_argument("--metrics-url", help="the server's Prometheus page (default: URL/metrics)")


def do_run(options: argparse.Namespace) -> int:
    from assay_load.gate import baseline, policy, verdict
    from assay_load.gate.run import judge_release

    chosen = policy.load(options.policy)
    known = baseline.read(options.baseline) if options.baseline else None
    found = judge_release(chosen, gate_options(options), known, say)
    verdict.write_all(found, options.out)
    if found.bounds:
        print("\n".join(["", *verdict.bounds_table(found.bounds)]))
    print(f"\n{found.verdict.upper()} after {found.seconds:.0f} s; {options.out}/gate.md")
    for reason in found.reasons:
        print(f"  {reason}")
    return found.exit_code


def do_baseline(options: argparse.Namespace) -> int:
    from assay_load.gate import policy
    from assay_load.gate.run import record

    chosen = policy.load(options.policy)
    repetitions = options.repetitions or chosen.repetitions + 2
    if repetitions < 3:
        raise InputError("--repetitions: at least 3")
    outputs.file(options.write, "--write")
    made = record(chosen, gate_options(options), repetitions, say)
    if made is None:
        print("assay-gate: no baseline was written: the server is not fit for one", file=sys.stderr)
        return 1
    made.write(options.write)
    print(f"written: {options.write}")
    return 0


def gate_options(options: argparse.Namespace) -> Options:
    from assay_load.gate.run import Options

    outputs.folder(options.out, "--out")
    return Options(
        options.url, options.out, options.hardware, options.image, options.model_revision,
        options.metrics_url,
    )  # fmt: skip


def do_policies(_: argparse.Namespace) -> int:
    from assay_load.gate import policy

    for name, path in policy.shipped().items():
        print(f"{name:12} {policy.load(name).about}\n{'':12} {path}")
    return 0


def do_schema(_: argparse.Namespace) -> int:
    from assay_load.gate.verdict import Verdict
    from assay_load.report.schema import as_text

    print(as_text(Verdict, "The verdict of the release gate"), end="")
    return 0


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
