"""What the plugin proved, as Prometheus metrics on vLLM's own `/metrics`.

Everything is read from the proof files when Prometheus asks, in the process that answers:
  assay_info{version,arch,mode,operators}  1 for each combination that a worker runs
  assay_layers{kind,how,worker}            layers that a worker took, or left to vLLM
  assay_processes_active                   living vLLM processes that registered the plugin
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from assay_kernels.vllm_plugin import proof

_REGISTRY_MODULES = (
    "vllm.v1.metrics.prometheus",
    "vllm.entrypoints.serve.instrumentator.metrics",
)


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
        combinations = set()
        for record in proofs:
            if (summary := record.summary) is None:
                continue
            combinations.add((record.version, summary.arch, summary.mode, summary.operators))
            worker = record.title.rpartition("::")[2] or str(record.pid)
            for (kind, how), count in sorted(summary.layers.items()):
                layers.add_metric([kind, how, worker], count)
        for combination in sorted(combinations):
            info.add_metric(list(combination), 1)
        yield info
        yield layers
        yield GaugeMetricFamily(
            "assay_processes_active",
            "Living vLLM processes that registered the plugin",
            value=len(proofs),
        )

    def describe(self) -> list[Any]:
        # Nothing to name in advance: lets a registry take the collector without reading files.
        return []


_installed: weakref.WeakSet[CollectorRegistry] = weakref.WeakSet()


def _add_to(registry: CollectorRegistry) -> CollectorRegistry:
    """Add the collector to a registry, once; returns the registry."""
    if registry not in _installed:
        _installed.add(registry)
        registry.register(ProofCollector())
    return registry


def register() -> None:
    """Make vLLM's `/metrics` show the plugin's; safe to call again.

    With several API servers, or with PROMETHEUS_MULTIPROC_DIR set, vLLM answers from a registry
    that it makes on the spot and that only knows metrics kept in files; so the function that makes
    it is wrapped, wherever it has been imported to.
    """
    import vllm.v1.metrics.prometheus as source

    _add_to(REGISTRY)
    original = source.get_prometheus_registry
    if getattr(original, "_assay", False):
        return

    def get_prometheus_registry() -> CollectorRegistry:
        return _add_to(original())

    wrapped: Callable[[], CollectorRegistry] = get_prometheus_registry
    wrapped._assay = True  # type: ignore[attr-defined]
    for name in _REGISTRY_MODULES:
        if (module := sys.modules.get(name)) is not None:
            module.get_prometheus_registry = wrapped  # type: ignore[attr-defined]
