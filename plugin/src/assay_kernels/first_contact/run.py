"""All of first contact, and the exit code it deserves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from assay_kernels.first_contact import correctness, environment, sanitizer
from assay_kernels.first_contact.correctness import Subject

PARTS = ("correctness", "speed", "sanitizer")


@dataclass(frozen=True)
class Options:
    quick: bool = False  # small shapes, few boundaries
    skip: tuple[str, ...] = ()


def subject(architecture: str) -> Subject:
    """The kernels of this architecture. Raises CompilerMissingError without the DSL on a GPU."""
    if architecture == "sm_100":
        from assay_kernels.kernels.sm100.kernels import BlackwellKernels

        return Subject(BlackwellKernels(), "cuda", w4a4=True)
    if architecture == "sm_90":
        from assay_kernels.kernels.sm90.kernels import HopperKernels

        return Subject(HopperKernels(), "cuda", w4a4=False)
    from assay_kernels.kernels.cpu.nvfp4 import CpuKernels

    return Subject(CpuKernels("w4a4"), "cpu", w4a4=True)


def first_contact(
    options: Options, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """One JSON object: environment, correctness, speed, sanitizer, passed.

    Without a GPU the CPU kernels stand in, so that the command itself can be tried anywhere; what
    needs a GPU says so.
    """
    begin = time.monotonic()
    architecture = environment.architecture()
    report: dict[str, Any] = {
        "architecture": architecture,
        "environment": environment.describe(),
        "quick": options.quick,
    }
    if "correctness" not in options.skip:
        say(f"correctness on {architecture}")
        report["correctness"] = correctness.judge(
            subject(architecture), quick=options.quick, say=say
        )
    if "speed" not in options.skip:
        if architecture == "cpu":
            report["speed"] = {"why": "no GPU"}
        else:
            from assay_kernels.first_contact.speed import measure

            say("speed")
            report["speed"] = measure(subject(architecture), architecture)
    if "sanitizer" not in options.skip:
        say("compute-sanitizer")
        report["sanitizer"] = {"why": "no GPU"} if architecture == "cpu" else sanitizer.sanitize()
    report["seconds"] = round(time.monotonic() - begin, 1)
    report["passed"] = _passed(report)
    return report


def _passed(report: dict[str, Any]) -> bool:
    checks = report.get("correctness", {"failures": [], "checked": {"": 1}})
    tools = [found for found in report.get("sanitizer", {}).values() if isinstance(found, dict)]
    clean = all(not found.get("errors") and not found.get("exit") for found in tools)
    return bool(checks["checked"]) and not checks["failures"] and clean


def text(report: dict[str, Any]) -> str:
    """One line a kernel, one a product, one a tool."""
    lines = [f"{report['architecture']}: {report['environment'].get('gpu', 'no GPU')}"]
    checks = report.get("correctness")
    if checks:
        failed: dict[str, int] = {}
        for failure in checks["failures"]:
            failed[failure["kernel"]] = failed.get(failure["kernel"], 0) + 1
        for kernel, count in checks["checked"].items():
            lines.append(f"{kernel:<22}{count:>6} checked{failed.get(kernel, 0):>6} failed")
    speed = report.get("speed")
    for row in speed if isinstance(speed, list) else []:
        took = f"{row['us']:.1f} us" if row["us"] is not None else row["why"]
        size = f"{row['m']} x {row['n']} x {row['k']}"
        lines.append(f"{size:<22}{row['impl']:<20}{took}")
    for tool, found in report.get("sanitizer", {}).items():
        lines.append(f"{tool:<22}{found}")
    lines.append("passed" if report["passed"] else "FAILED")
    return "\n".join(lines)
