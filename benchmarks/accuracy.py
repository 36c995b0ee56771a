"""What the kernels' roundings come to: errors of products, and perplexity on a text.

Products of random rows with random weights, of each kind of weight and by each kind of kernel,
against float64: the error is the root of the mean square, as a share of that of the products. Then
the model as its file means it, in torch's float32, against every way to compute it here: perplexity
of a text, how far the distributions lie apart (Kullback-Leibler divergence, in nats for a token),
and how often the likeliest token is the same. The text is the project's own documentation unless
another is given.

    OMP_NUM_THREADS=2 python -m benchmarks.accuracy
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.peers.weights import bfloat16_folder
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kernels.cpu import (
    BLOCK,
    BLOCK_FORMATS,
    Blocks,
    Format,
    PackedLinear,
    extension,
)
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.loading.registry import resolve_model
from palmette.runtime.tokenization import load_tokenizer

PAGE_SIZE = 16
ROOT = Path(__file__).resolve().parent.parent
KINDS = ("float32", "bfloat16", *BLOCK_FORMATS)


@dataclass(frozen=True, slots=True)
class Found:
    """Of one way to compute the model, against the file's meaning in float32."""

    perplexity: float
    divergence: float
    """Mean Kullback-Leibler divergence of a token's distribution, in nats."""
    agreement: float
    """Share of tokens whose likeliest successor is the same."""


@contextmanager
def kernels_chosen(name: str) -> Iterator[None]:
    before = os.environ.get("PALMETTE_KERNELS")
    os.environ["PALMETTE_KERNELS"] = name
    try:
        yield
    finally:
        del os.environ["PALMETTE_KERNELS"]
        if before is not None:
            os.environ["PALMETTE_KERNELS"] = before


def weight_of(kind: str, n: int, k: int) -> tuple[PackedLinear, torch.Tensor]:
    """A random weight, packed, and what it means in float64."""
    weight = torch.randn(n, k) / math.sqrt(k)
    if kind not in BLOCK_FORMATS:
        dtype = getattr(torch, kind)
        return PackedLinear([weight], k, dtype=dtype), weight.to(dtype).double()
    number = gguf.GGMLQuantizationType[kind]
    is_long = gguf.GGML_QUANT_SIZES[number][0] > BLOCK  # which the package only decodes
    rows = random_blocks(number, n, k) if is_long else quants.quantize(weight.numpy(), number)
    linear = PackedLinear(
        [Blocks(kind, torch.from_numpy(rows.view(np.uint8)))], k, dtype=torch.float32
    )
    if is_long:  # what is kept, since scales are rounded
        return linear, linear.rows().double()
    return linear, torch.from_numpy(quants.dequantize(rows, number).astype(np.float64))


def random_blocks(number: gguf.GGMLQuantizationType, n: int, k: int) -> np.ndarray[Any, Any]:
    """Rows of blocks with a K: any bytes, but for the halves among them."""
    length, size = gguf.GGML_QUANT_SIZES[number]
    raw = np.random.default_rng(0).integers(0, 256, (n, k // length, size), np.uint8)
    halves = np.full((n, k // length, 2), 1e-4, np.float16).view(np.uint8)
    if number == gguf.GGMLQuantizationType.Q6_K:
        raw[:, :, -2:] = halves[:, :, :2]
    else:
        raw[:, :, :4] = halves
    return raw.reshape(n, -1)


def takes(name: str, is_exact: bool) -> list[str]:
    """What the kernels make of inputs, for each format of weights."""
    return [extension().takes(name, is_exact, each) for each in Format]


def product_error(name: str, kind: str, *, is_exact: bool, n: int = 576, k: int = 1536) -> float:
    """Of a product with rows that are normally distributed, in float32."""
    torch.manual_seed(0)
    linear, meant = weight_of(kind, n, k)
    x = torch.randn(64, k)
    y = torch.empty(64, n)
    extension().multiply(name, is_exact, linear.handle, x.data_ptr(), 64, y.data_ptr(), 0)
    exact = x.double() @ meant.T
    return float(((y.double() - exact).square().mean() / exact.square().mean()).sqrt())


def windows_of(token_ids: Sequence[int], length: int) -> list[list[int]]:
    starts = range(0, len(token_ids) - length + 1, length)
    return [list(token_ids[start : start + length]) for start in starts]


def log_probs(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    """Of every token in the vocabulary, after each of these tokens. [len(token_ids), vocab_rows]"""
    count = len(token_ids)
    num_pages = -(-count // PAGE_SIZE)
    pool = loaded.new_pool(num_pages, PAGE_SIZE)
    positions = list(range(count))
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=positions,
        query_starts=[0, count],
        context_lengths=[count],
        page_tables=[list(range(num_pages))],
        logit_rows=positions,
    )
    with torch.inference_mode():
        return loaded.model.forward(batch, pool).float().log_softmax(-1)


def compare(
    ways: dict[str, LoadedModel], reference: str, windows: Sequence[list[int]]
) -> dict[str, Found]:
    loss = dict.fromkeys(ways, 0.0)
    apart = dict.fromkeys(ways, 0.0)
    same = dict.fromkeys(ways, 0)
    num_tokens = 0
    for window in track(windows, "reading", console=Console(stderr=True)):
        num_tokens += len(window) - 1
        successors = torch.tensor(window[1:])[:, None]
        meant = log_probs(ways[reference], window)[:-1]
        for name, loaded in ways.items():
            found = meant if name == reference else log_probs(loaded, window)[:-1]
            loss[name] -= found.gather(1, successors).sum().item()
            apart[name] += (meant.exp() * (meant - found)).sum().item()
            same[name] += int((found.argmax(-1) == meant.argmax(-1)).sum())
    return {
        name: Found(
            math.exp(loss[name] / num_tokens), apart[name] / num_tokens, same[name] / num_tokens
        )
        for name in ways
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a known model or a GGUF file")
    parser.add_argument("--text", type=Path, nargs="+", help="files of UTF-8")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--windows", type=int, default=40, help="at most")
    parser.add_argument("--work-dir", type=Path, default=Path("build") / "benchmarks")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if extension() is None:
        parser.error("the extension in C++ was not built: there is nothing to compare")
    names: list[str] = extension().available()

    kernels = [(name, False) for name in names]
    kernels += [(name, True) for name in names if takes(name, True) != takes(name, False)]
    errors = {
        kind: {
            name + (", exact" if is_exact else ""): product_error(name, kind, is_exact=is_exact)
            for name, is_exact in kernels
        }
        for kind in KINDS
    }
    table = Table("kernels", *KINDS, title="Products against float64: error, as a share")
    for name in errors[KINDS[0]]:
        table.add_row(name, *(f"{errors[kind][name]:.1e}" for kind in KINDS))
    console.print(table)

    reference = "float32, torch"
    ways = {reference: load_model(path, "float32", kernels="torch")}
    ways["bfloat16, torch"] = load_model(path, "bfloat16", kernels="torch")
    ways["float32, own"] = load_model(path, "float32", kernels="cpu")
    for name in names:
        with kernels_chosen(name):
            ways[f"bfloat16, {name}"] = load_model(path, "bfloat16", kernels="cpu")
    folder = bfloat16_folder(path, args.work_dir)
    ways["weights rounded to bfloat16, own"] = load_model(folder, "bfloat16", kernels="cpu")

    files = args.text or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    token_ids = load_tokenizer(path).encode(text)
    windows = windows_of(token_ids, args.window)[: args.windows]
    if not windows:
        parser.error(f"the text has {len(token_ids)} tokens, less than one window")
    results = compare(ways, reference, windows)
    table = Table(
        "way",
        "perplexity",
        "of the file's",
        "divergence",
        "same likeliest token",
        title=f"{args.model}, {platform.machine()}: {len(windows)} windows of {args.window} tokens",
    )
    exact = results[reference].perplexity
    for name, each in results.items():
        table.add_row(
            name,
            f"{each.perplexity:.4f}",
            f"{100 * (each.perplexity / exact - 1):+.3f} %",
            f"{each.divergence:.2e}",
            f"{100 * each.agreement:.2f} %",
        )
    console.print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        told = {"errors": errors, "ways": {name: asdict(each) for name, each in results.items()}}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
