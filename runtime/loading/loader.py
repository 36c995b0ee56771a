"""Loads a model: picks the reader for the files and the number type for the processor."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from palmette.errors import InvalidRequest, ModelFileError
from palmette.runtime.attention import AttentionBackend
from palmette.runtime.config import KernelsName
from palmette.runtime.kernels.cpu import (
    multiplies_bfloat16,
    multiplies_bytes,
)
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.layers.linear import Linear, MakeLinear
from palmette.runtime.loading.gguf_model import GGUFModel
from palmette.runtime.loading.hf_folder import HFFolder
from palmette.runtime.loading.source import WeightSource, check_tensors
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.cpu_llama import CpuLlama
from palmette.runtime.models.llama import LlamaModel, tensor_shapes
from palmette.runtime.models.model import Model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Rows of a small decoding batch, on which "auto" compares the types.
_TRIAL_ROWS = 8
_TRIAL_REPEATS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, and how it came there.

    `weights_digest` tells its weights from others where there is no file that could be hashed.
    `kernels` names what computes it: "torch", or our own, such as "avx512".
    """

    model: Model
    config: ModelConfig
    dtype: torch.dtype
    dtype_reason: str
    path: Path
    num_weight_bytes: int
    kernels: str = "torch"
    kernels_reason: str = "asked for"
    weights_digest: str | None = None

    def new_pool(
        self, num_pages: int, page_size: int, device: torch.device | str = "cpu"
    ) -> KVPool:
        """A pool of pages, laid out for what computes the model.

        Raises InvalidRequest if there is no memory for it.
        """
        return KVPool(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.dtype,
            device=device,
            pages_first=self.kernels != "torch",
        )


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    *,
    kernels: KernelsName = "auto",
    attention: AttentionBackend | None = None,
    linear: MakeLinear = Linear,
) -> LoadedModel:
    """The model of a .gguf file or of a Hugging Face folder.

    `kernels` is "torch", "cpu" (our own in C++, see `CpuLlama`) or "auto": our own where they can
    compute the model, and torch elsewhere. `dtype` is "float32", "bfloat16" or "auto": bfloat16
    where the processor multiplies it natively (in torch, where that is faster, tried on this
    model's largest layer) or where our kernels multiply packed weights of 4 bits by bytes.
    Raises ModelFileError if any tensor
    is missing, misshapen, unknown or cut off, before anything is computed with it, and
    InvalidRequest for an unknown `dtype`, a `device` that is not here, or `kernels` that cannot
    compute the model. `attention` replaces the
    default backend: `TorchAttention(share_prefixes=False)` makes bfloat16 results independent of
    which sequences share a batch, as float32 results are anyway, for slower batches with a long
    common prefix. `linear` replaces the maker of linear maps. Both are torch's.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise InvalidRequest(
            f"dtype must be one of auto, {', '.join(_DTYPES)}, got {dtype!r}", param="dtype"
        )
    if kernels not in get_args(KernelsName):
        raise InvalidRequest(
            f"kernels must be one of {', '.join(get_args(KernelsName))}, got {kernels!r}",
            param="kernels",
        )
    device = _usable(device)
    is_replaced = attention is not None or linear is not Linear
    path = Path(path)
    with closing(_open(path)) as source:
        config = source.config
        check_tensors(source, tensor_shapes(config))
        own_dtype, reason = _own_dtype(dtype, source)
        refusal = _refusal(kernels, config, own_dtype, device, is_replaced)
        if refusal is not None and kernels == "cpu":
            raise InvalidRequest(f"kernels='cpu' cannot be used: {refusal}", param="kernels")
        model: Model
        if refusal is None:
            chosen = own_dtype
            own = CpuLlama(config, source.read, source.blocks, dtype=chosen)
            model, name = own, own.kernels
        else:
            if dtype == "auto":
                chosen, reason = _fastest(config, device)
            else:
                chosen, reason = _DTYPES[dtype], "asked for"
            name = "torch"
            model = LlamaModel(
                config, source.read, dtype=chosen, device=device, attention=attention, linear=linear
            )
    return LoadedModel(
        kernels=name,
        kernels_reason=refusal or ("asked for" if kernels == "cpu" else "they can compute it"),
        model=model,
        config=config,
        dtype=chosen,
        dtype_reason=reason,
        path=path,
        num_weight_bytes=model.num_weight_bytes,
    )


def _own_dtype(dtype: str, source: WeightSource) -> tuple[torch.dtype, str]:
    """What our own kernels would compute with, and why."""
    if dtype != "auto":
        return _DTYPES[dtype], "asked for"
    if multiplies_bfloat16():
        return torch.bfloat16, "the kernels for this processor have products of bfloat16"
    blocks = source.blocks("model.layers.0.self_attn.o_proj.weight")
    if blocks is not None and multiplies_bytes(blocks.kind):
        return torch.bfloat16, "with it packed weights are multiplied by bytes"
    return torch.float32, "the kernels for this processor do not have products of bfloat16"


def _refusal(
    kernels: KernelsName,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    is_replaced: bool,
) -> str | None:
    """Why our own kernels do not compute the model, if they do not."""
    if kernels == "torch":
        return "torch was asked for"
    if device.type != "cpu":
        return f"they are for CPUs, and the device is {device}"
    if is_replaced:
        return "attention or linear maps of torch were asked for"
    return CpuLlama.refusal(config, dtype)


def _usable(device: torch.device | str) -> torch.device:
    """The device, if it can hold numbers here; raises InvalidRequest."""
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise RuntimeError("it holds shapes, no numbers")
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidRequest(
            f"the device {str(device)!r} cannot be used here: {reason}", param="device"
        ) from error
    return found


def _open(path: Path) -> WeightSource:
    if path.is_dir():
        return HFFolder(path)
    if not path.is_file():
        raise ModelFileError(path, "there is no such file or folder")
    if path.suffix.lower() != ".gguf":
        raise ModelFileError(
            path, "is neither a .gguf file nor a folder with config.json and safetensors"
        )
    return GGUFModel(path)


def _fastest(config: ModelConfig, device: torch.device) -> tuple[torch.dtype, str]:
    """The faster of bfloat16 and float32 for this model's shape here, and why."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU multiplies bfloat16 natively"
        return torch.float32, "the GPU does not multiply bfloat16 natively"
    if device.type != "cpu":
        return torch.float32, f"bfloat16 is not tried on a device of type {device.type}"
    if not _multiplies_bfloat16():
        return torch.float32, "the processor does not multiply bfloat16 natively"
    seconds = {kind: _trial_seconds(config, kind) for kind in _DTYPES.values()}
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    measured = (
        f"{_TRIAL_ROWS} rows through a {config.hidden_size} x {config.intermediate_size} layer "
        f"took {seconds[torch.bfloat16] * 1e6:.0f} us in bfloat16 and "
        f"{seconds[torch.float32] * 1e6:.0f} us in float32 on one thread"
    )
    if ratio > 1:
        return torch.bfloat16, f"the processor multiplies bfloat16 natively, and {measured}"
    return torch.float32, f"the processor multiplies bfloat16 natively, but {measured}"


def _multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _trial_seconds(config: ModelConfig, dtype: torch.dtype) -> float:
    """The shortest of a few runs on one thread: with more, a busy neighbour decides the result."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            layer = Linear(torch.zeros(config.intermediate_size, config.hidden_size, dtype=dtype))
            x = torch.zeros(_TRIAL_ROWS, config.hidden_size, dtype=dtype)
            best = float("inf")
            for _ in range(_TRIAL_REPEATS):
                start = time.perf_counter()
                layer(x)
                best = min(best, time.perf_counter() - start)
            return best
    finally:
        torch.set_num_threads(num_threads)
