"""What the plugin proved, as Prometheus metrics on vLLM's own `/metrics`.

Everything is read from the proof files when Prometheus asks, in the process that answers:
  assay_info{version,arch,mode,operators}  1 for each combination that a worker runs
  assay_layers{kind,how,worker}            layers that a worker took, or left to vLLM
  assay_processes_active                   living vLLM processes that registered the plugin
  assay_kernel_selfcheck{kind,shape,arch,impl}
                                           largest error over its bound that any worker found
  assay_kernel_active_layers{kind,impl}    layers by the kernel that serves them, over all workers
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from assay_kernels.vllm_plugin import proof


class ProofCollector(Collector):
    def collect(self) -> Iterator[GaugeMetricFamily]:
        proofs = proof.read_all()
        info = GaugeMetricFamily(
            "assay_info",
            "Version, architecture, arithmetic mode and origin of V4's operators in use",
            labels=["version", "arch", "mode", "operators"],
        )
        layers = GaugeMetricFamily(
            "assay_layers",
            "Layers per kind, and how each worker runs them",
            labels=["kind", "how", "worker"],
        )
        ratio = GaugeMetricFamily(
            "assay_kernel_selfcheck",
            "Largest error of the self-check over its bound; at most 1 passes",
            labels=["kind", "shape", "arch", "impl"],
        )
        active = GaugeMetricFamily(
            "assay_kernel_active_layers",
            "Layers of all workers by the kernel that serves them",
            labels=["kind", "impl"],
        )
        ratios: dict[tuple[str, str, str, str], float] = {}
        served: Counter[tuple[str, str]] = Counter()
        combinations = set()
        for record in proofs:
            if (summary := record.summary) is None:
                continue
            combinations.add((record.version, summary.arch, summary.mode, summary.operators))
            worker = record.title.rpartition("::")[2] or str(record.pid)
            for (kind, how), count in sorted(summary.layers.items()):
                layers.add_metric([kind, how, worker], count)
            for row in summary.checks:
                key = (row.kind, row.shape, summary.arch, row.impl)
                ratios[key] = max(ratios.get(key, 0.0), row.ratio)
                served[row.kind, row.impl] += row.layers
        for combination in sorted(combinations):
            info.add_metric(list(combination), 1)
        for key, value in sorted(ratios.items()):
            ratio.add_metric(list(key), value)
        for (kind, impl), count in sorted(served.items()):
            active.add_metric([kind, impl], count)
        yield info
        yield layers
        yield ratio
        yield active
        yield GaugeMetricFamily(
            "assay_processes_active",
            "Living vLLM processes that registered the plugin",
            value=len(proofs),
        )

    def describe(self) -> list[Any]:
        # Nothing to name in advance: lets a registry take the collector without reading files.
        return []


_registered = False


def register() -> None:
    """Make this process's `/metrics` show the plugin's metrics; safe to call again.

    With several API servers, or with PROMETHEUS_MULTIPROC_DIR set, vLLM answers from registries
    made for the occasion that hold nothing but a reader of metric files. There the reader is made
    to tell of the proofs too.
    """
    global _registered
    if _registered:
        return
    _registered = True
    REGISTRY.register(ProofCollector())
    read_files: Callable[[MultiProcessCollector], Iterable[Metric]] = MultiProcessCollector.collect

    def collect(self: MultiProcessCollector) -> Iterator[Metric]:
        yield from read_files(self)
        yield from ProofCollector().collect()

    MultiProcessCollector.collect = collect  # type: ignore[method-assign]
