"""Recording activation maxima by running the model on prompts: `convert --calibrate PROMPTS`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay_kernels.checkpoint.dialect import Dialect
from assay_kernels.checkpoint.export import RECIPES
from assay_kernels.checkpoint.names import Scheme, convert_name
from assay_kernels.checkpoint.reader import Checkpoint
from assay_kernels.checkpoint.spec import Kind
from assay_kernels.checkpoint.weights import Precision

_TOKENIZER = "tokenizer.json"


class PromptsError(ValueError):
    """A prompts file that cannot be used. The message is one line."""


def read_prompts(path: Path, directory: Path, vocabulary: int) -> list[list[int]]:
    """Token ids of every prompt.

    path: one prompt a line. A line that is a JSON list of integers is token ids; a JSON string or
        an object with "prompt" or "text" is text, as is any other line
    directory: where the source's tokenizer.json is; needed for text only
    Raises PromptsError.
    """
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path}: cannot be read: {error}") from None
    prompts: list[list[int]] = []
    tokenizer: Any = None
    for number, line in enumerate(lines, start=1):
        value = _parsed(line)
        if isinstance(value, list):
            ids = value
        else:
            if tokenizer is None:
                tokenizer = _tokenizer(directory, path)
            ids = tokenizer.encode(value).ids
        if not ids or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
            raise PromptsError(f"{path}:{number}: token ids must be in 0..{vocabulary - 1}")
        prompts.append(ids)
    if not prompts:
        raise PromptsError(f"{path}: holds no prompt")
    return prompts


def _parsed(line: str) -> list[Any] | str:
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if isinstance(value, dict):
        value = value.get("prompt", value.get("text", value.get("token_ids", line)))
    return value if isinstance(value, (list, str)) else line


def _tokenizer(directory: Path, prompts: Path) -> Any:
    if not (directory / _TOKENIZER).is_file():
        raise PromptsError(
            f"{prompts} holds text and {directory} has no {_TOKENIZER}: use token ids"
        )
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / _TOKENIZER))


class _Observer:
    """Largest input magnitude by transformers' module name."""

    def __init__(self) -> None:
        self.amax: dict[str, float] = {}

    def see(self, name: str, value: Tensor) -> None:
        if value.numel():
            seen = float(value.detach().abs().max())
            self.amax[name] = max(seen, self.amax.get(name, 0.0))

    def linear(self, name: str) -> Any:
        return lambda _module, inputs: self.see(name, inputs[0])

    def experts(self, name: str) -> Any:
        """Every expert's inputs: w1 and w3 read the tokens routed to it, w2 what they make."""

        def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
            hidden, chosen = inputs[0], inputs[1]
            hidden = hidden.reshape(-1, hidden.shape[-1])
            chosen = chosen.reshape(hidden.shape[0], -1)
            for expert in torch.unique(chosen).tolist():
                if expert >= module.num_experts:
                    continue
                tokens = hidden[(chosen == expert).any(-1)]
                self.see(f"{name}.{expert}.gate_proj", tokens)
                self.see(f"{name}.{expert}.up_proj", tokens)
                both = torch.nn.functional.linear(tokens, module.gate_up_proj[expert])
                self.see(f"{name}.{expert}.down_proj", module._apply_gate(both))

        return hook


def _hooks(model: Any, observer: _Observer) -> Iterator[Any]:
    for name, module in model.named_modules():
        if type(module).__name__ == "DeepseekV4Experts":
            yield module.register_forward_pre_hook(observer.experts(name))
        elif isinstance(module, torch.nn.Linear):
            yield module.register_forward_pre_hook(observer.linear(name))


def activation_maxima(
    checkpoint: Checkpoint, prompts: list[list[int]], target: Dialect
) -> Mapping[str, float]:
    """entry -> largest magnitude of its input, for every weight that `target` stores as NVFP4.

    Runs transformers' model in fp32 on the source's dequantised weights. An expert that no prompt
    reached takes the largest value of its layer's experts; MTP layers are not run and stay dynamic.
    """
    from assay_kernels.checkpoint.hf import load_transformers_model

    model: Any = load_transformers_model(checkpoint)
    observer = _Observer()
    handles = list(_hooks(model, observer))
    with torch.no_grad():
        for ids in prompts:
            model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    seen = {
        convert_name(f"{name}.weight", Scheme.DEEPSEEK).removesuffix(".weight"): value
        for name, value in observer.amax.items()
    }
    result: dict[str, float] = {}
    for entry, module in checkpoint.modules().items():
        if RECIPES[target].get(module.kind) is not Precision.NVFP4 or entry.startswith("mtp."):
            continue
        value = seen.get(entry)
        if value is None and module.kind is Kind.ROUTED:
            value = _of_layer(seen, entry)
        if value:
            result[entry] = value
    return result


def _of_layer(seen: Mapping[str, float], entry: str) -> float | None:
    layer, _, rest = entry.partition(".ffn.experts.")
    leaf = rest.rpartition(".")[2]
    values = [
        value
        for name, value in seen.items()
        if name.startswith(f"{layer}.ffn.experts.") and name.endswith(f".{leaf}")
    ]
    return max(values, default=None)
