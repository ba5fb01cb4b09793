"""Puts a known fault into the CPU kernels of every process that has this folder on Python's
path: the shared experts' gate and up are multiplied with each other's global scale.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

MODULE = "assay_kernels.kernels.cpu.nvfp4"


class _Break(importlib.abc.MetaPathFinder):
    """Alters the module once it has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _alter(module.CpuKernels)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _alter(kernels: Any) -> None:
    def prepare_gate_up(self: Any, weight: Any) -> Any:
        if weight.alpha.dim() == 1:  # the shared experts'
            weight = replace(weight, alpha=weight.alpha.roll(len(weight.alpha) // 2))
        return kernels.prepare(self, weight)

    kernels.prepare_gate_up = prepare_gate_up


sys.meta_path.insert(0, _Break())
