"""Makes the plugin's import fail in one vLLM process: the one that BREAK_IMPORT_IN names.

On PYTHONPATH, Python runs this file at its start. Only vLLM's own attempt to load the plugin fails:
its quantisation config also travels to the workers inside a pickle, and a worker that cannot even
unpickle dies by itself.
"""

import importlib.metadata
import multiprocessing
import os
from typing import Any

_load = importlib.metadata.EntryPoint.load


def load(self: importlib.metadata.EntryPoint) -> Any:
    # vLLM names its worker processes when it starts them.
    if (
        self.name == "assay"
        and multiprocessing.current_process().name == (os.environ["BREAK_IMPORT_IN"])
    ):
        raise ImportError("libassay.so.1: broken for this test")
    return _load(self)


importlib.metadata.EntryPoint.load = load  # type: ignore[method-assign]
