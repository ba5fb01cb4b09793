"""Every check of one rank, in order, and what follows a failure."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from assay_kernels.kernels.interface import KernelSet
from assay_kernels.selfcheck import kernels as kernel_check
from assay_kernels.selfcheck import weights as weight_check
from assay_kernels.selfcheck.calls import MismatchError
from assay_kernels.selfcheck.deadline import Deadline
from assay_kernels.selfcheck.report import Report, Row
from assay_kernels.selfcheck.shards import ShardReader
from assay_kernels.selfcheck.subject import Subject
from assay_kernels.settings import OnMismatch

Check = Callable[[Subject, ShardReader, Deadline], float]


class SelfCheckError(Exception):
    """Nothing may be served: names the layer, the kernel and what was wrong."""


@dataclass
class _Found:
    kernel: float = 0.0
    weights: float = 0.0


class _Run:
    def __init__(
        self,
        subjects: Sequence[Subject],
        reader: ShardReader,
        fallbacks: Sequence[KernelSet],
        policy: OnMismatch,
        deadline: Deadline,
    ) -> None:
        self.subjects = subjects
        self.reader = reader
        self.fallbacks = fallbacks
        self.policy = policy
        self.deadline = deadline
        self.found = {subject.name: _Found() for subject in subjects}
        self.left = {subject.name: list(fallbacks) for subject in subjects}
        self.replaced: list[str] = []

    def attempt(self, check: Check, subject: Subject) -> float | str:
        """A passing check's ratio, or why it did not pass."""
        try:
            return check(subject, self.reader, self.deadline)
        except MismatchError as error:
            return str(error)
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"

    def check_kernels(self) -> None:
        """One layer of each kind and shape; where it fails, the fault is the kernel's unless
        another layer of that shape passes."""
        alike: dict[tuple[str, str, str], list[Subject]] = defaultdict(list)
        for subject in self.subjects:
            alike[subject.kind, subject.shape, subject.kernels.name].append(subject)
        for group in alike.values():
            result = self.attempt(kernel_check.check, group[0])
            if isinstance(result, str):
                other = self.attempt(kernel_check.check, group[1]) if group[1:] else result
                failed = group if isinstance(other, str) else group[:1]
                for subject in failed:
                    self.replace(subject, result, checked=subject is not failed[0])
                for subject in group[len(failed) :]:
                    assert isinstance(other, float)
                    self.found[subject.name].kernel = other
            else:
                for subject in group:
                    self.found[subject.name].kernel = result

    def check_weights(self) -> None:
        """Every layer."""
        for subject in self.subjects:
            result = self.attempt(weight_check.check, subject)
            if isinstance(result, str):
                self.replace(subject, result)
            else:
                self.found[subject.name].weights = result

    def replace(self, subject: Subject, reason: str, checked: bool = False) -> None:
        """Next in the chain, until one passes both checks; `checked`: a layer of the same shape
        has just passed the kernels'. Raises SelfCheckError."""
        while True:
            what = f"{subject.name} by {subject.kernels.name}: {reason}"
            if self.policy == "abort":
                raise SelfCheckError(f"{what} (ASSAY_ON_MISMATCH=abort)")
            if not self.left[subject.name]:
                raise SelfCheckError(f"{what}; no other kernel is left for this layer")
            following = self.left[subject.name].pop(0)
            self.replaced.append(f"{what}; replaced by {following.name}")
            subject.rebuild(following, self.reader)
            results = [self.attempt(weight_check.check, subject)]
            if not checked:
                results.append(self.attempt(kernel_check.check, subject))
            failures = [r for r in results if isinstance(r, str)]
            if not failures:
                ratios = [r for r in results if isinstance(r, float)]
                self.found[subject.name] = _Found(ratios[-1], ratios[0])
                return
            reason = failures[0]

    def rows(self) -> tuple[Row, ...]:
        cells: dict[tuple[str, str, str], list[_Found]] = defaultdict(list)
        for subject in self.subjects:
            key = (subject.kind, subject.shape, subject.kernels.name)
            cells[key].append(self.found[subject.name])
        return tuple(
            Row(*key, len(f), max(x.kernel for x in f), max(x.weights for x in f))
            for key, f in sorted(cells.items())
        )


@contextmanager
def _fp32_by_default() -> Iterator[None]:
    """vLLM loads a model with bf16 as torch's default type: nothing here may inherit that."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run(
    subjects: Sequence[Subject],
    reader: ShardReader,
    *,
    fallbacks: Sequence[KernelSet],
    policy: OnMismatch,
    deadline: Deadline,
    arch: str,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Check every subject; those that fail are served by the next of `fallbacks` that passes.

    Raises SelfCheckError, which names the layer, where none does or where the policy is to abort.
    """
    began = time.monotonic()
    checks = _Run(subjects, reader, fallbacks, policy, deadline)
    with _fp32_by_default():
        checks.check_kernels()
        checks.check_weights()
    return Report(
        arch=arch,
        seconds=time.monotonic() - began,
        matrices=sum(subject.matrices for subject in subjects),
        rows=checks.rows(),
        replaced=tuple(checks.replaced),
        environment=dict(environment or {}),
    )
