"""The Llama family on a CPU: a whole step in one call of the kernels in C++."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, groupby
from typing import Any

import torch

from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kernels.cpu import (
    BLOCK,
    BLOCK_FORMATS,
    Blocks,
    PackedLinear,
    WeightMemory,
    extension,
    kernels_for,
)
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.layers.rotary import RotaryTable
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.llama import EMBEDDING, FINAL_NORM, HEAD, tensor_shapes

Read = Callable[[str], torch.Tensor]
ReadBlocks = Callable[[str], Blocks | None]


class CpuLlama:
    """As `LlamaModel`, over packed weights and with sums in a fixed order.

    Each output of a product is summed in the order of the inputs, and a row of attention over its
    keys in their order, 64 from a multiple of 64 on together: what stands beside a row in a batch,
    chunks and threads change no bit of it. Weights in GGUF's blocks of 4 to 8 bits stay packed, all
    others are kept in `dtype`, bfloat16 in 12 bits of the same meaning where there are kernels for
    that. In bfloat16, what goes into a product with weights of 4 or 5 bits is
    rounded to 8 bits where the processor multiplies those, each 32 inputs with a scale of their own
    and the largest of them with 12 bits; what goes into one with weights of bfloat16 is rounded to
    that where there are kernels for it. All else is float32.
    """

    is_batch_invariant = True

    def __init__(
        self, config: ModelConfig, read: Read, blocks: ReadBlocks, *, dtype: torch.dtype
    ) -> None:
        """`read(name)` gives a tensor of `tensor_shapes(config)`; `blocks(name)` the same packed,
        if it is. Raises ValueError where `refusal` has a reason.
        """
        reason = self.refusal(config, dtype)
        if reason is not None:
            raise ValueError(reason)
        self.config = config
        self.dtype = dtype
        self.device = torch.device("cpu")
        kernels = kernels_for(dtype)
        assert kernels is not None
        self.kernels = kernels
        with torch.inference_mode():
            packer = _Packer(config, read, blocks, dtype, compact=extension().has_b12(kernels))
            self._layers = [packer.layer(i) for i in range(config.num_layers)]
            embedding = packer.linear([EMBEDDING])
            head = embedding if config.tie_word_embeddings else packer.linear([HEAD])
            self._embedding, self._head = embedding.handle, head.handle
            self._num_logits = head.num_outputs  # of which the last may have no meaning
            self._final_norm = packer.vector(FINAL_NORM)
            self._rotary = RotaryTable(
                config.rope, config.head_dim, config.max_context, self.device
            )
        # What the kernels have the addresses of.
        self._vectors, self._linears = packer.vectors, packer.linears
        self._num_threads = torch.get_num_threads()
        self._step = self._made(self._num_threads)

    @staticmethod
    def refusal(config: ModelConfig, dtype: torch.dtype) -> str | None:
        """Why the kernels cannot compute this model, if they cannot."""
        native = extension()
        if native is None:
            return "the extension in C++ was not built"
        if kernels_for(dtype) is None:
            return "PALMETTE_KERNELS is torch"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"there are no kernels for {dtype}"
        group = config.num_heads // config.num_kv_heads
        if config.head_dim % 16 or config.head_dim > native.MAX_HEAD_DIM:
            return f"heads of {config.head_dim} numbers are not a multiple of 16, or too large"
        if group > native.MAX_HEADS_TOGETHER:
            return f"{group} query heads for one of keys are too many"
        for what, size in (
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("num_heads * head_dim", config.q_size),
        ):
            if size % BLOCK:
                return f"{what}, {size}, is not a multiple of {BLOCK}"
        return None

    @property
    def num_weight_bytes(self) -> int:
        """Bytes held for weights."""
        vectors = sum(vector.nbytes for vector in self._vectors)
        return vectors + sum(linear.num_bytes for linear in self._linears)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Logits of `batch.logit_rows` [R, vocab_rows] float32; keys and values go into `kv`.

        Raises ValueError for a batch that reaches outside the pool, the vocabulary or itself.
        """
        num_threads = torch.get_num_threads()
        if num_threads != self._num_threads:
            self._step, self._num_threads = self._made(num_threads), num_threads
        num_logits = len(batch.logit_rows)
        logits = torch.empty(num_logits, self._num_logits)
        tables = [
            table[: -(-length // kv.page_size)]
            for table, length in zip(batch.page_tables, batch.context_lengths, strict=True)
        ]
        # One list: arrays and tensors that are made for a step each take a thousandth of it.
        numbers = [
            *batch.token_ids,
            *batch.positions,
            *batch.slots,
            *batch.logit_rows,
            *batch.query_starts,
            *batch.context_lengths,
            *accumulate(map(len, tables), initial=0),
        ]
        for table in tables:
            numbers += table
        layer_step, _, head_step, page_step = kv.steps
        cosines, sines = self._rotary.tables(max(batch.context_lengths))
        self._step.forward(
            len(batch.token_ids),
            batch.num_sequences,
            num_logits,
            numbers,
            cosines.shape[0],
            cosines.data_ptr(),
            sines.data_ptr(),
            kv.address,
            kv.num_pages,
            kv.page_size,
            layer_step,
            head_step,
            page_step,
            kv.dtype == torch.bfloat16,
            logits.data_ptr(),
        )
        return logits[:, : self.config.vocab_rows]

    def _made(self, num_threads: int) -> Any:
        config = self.config
        step = extension().Llama(
            self.kernels,
            self.dtype == torch.float32,
            num_threads,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_rows,
            config.rms_norm_eps,
            config.head_dim**-0.5,
        )
        for parts in self._layers:
            step.add(*parts)
        step.finish(self._final_norm, self._embedding, self._head)
        return step


class _Packer:
    """Makes what the kernels read, as they take it, and keeps it."""

    def __init__(
        self,
        config: ModelConfig,
        read: Read,
        blocks: ReadBlocks,
        dtype: torch.dtype,
        *,
        compact: bool,
    ) -> None:
        self.vectors: list[torch.Tensor] = []
        self.linears: list[PackedLinear] = []
        self._config = config
        self._shapes = tensor_shapes(config)
        self._read = read
        self._blocks = blocks
        self._dtype = dtype
        self._compact = compact
        self._memory = WeightMemory()

    def layer(self, index: int) -> tuple[Any, ...]:
        """The arguments that add a layer to a step."""
        name, config = f"model.layers.{index}.", self._config
        attn, mlp = name + "self_attn.", name + "mlp."
        queries = [f"{attn}{part}_proj.weight" for part in "qkv"]
        gates = [f"{mlp}{part}_proj.weight" for part in ("gate", "up")]
        return (
            self.vector(name + "input_layernorm.weight"),
            [each.handle for each in self.linears_of(queries, has_bias=config.attention_bias)],
            self.linear([attn + "o_proj.weight"], has_bias=config.attention_bias).handle,
            self.vector(name + "post_attention_layernorm.weight"),
            self.linear(gates, has_bias=config.mlp_bias, interleaved=True).handle,
            self.linear([mlp + "down_proj.weight"], has_bias=config.mlp_bias).handle,
        )

    def linears_of(self, names: list[str], *, has_bias: bool) -> list[PackedLinear]:
        """The maps of these weights, neighbours that are kept alike in one."""
        runs = groupby(zip(names, map(self._blocks, names), strict=True), lambda one: _kind(one[1]))
        return [self._linear(dict(run), has_bias=has_bias) for _, run in runs]

    def linear(
        self, names: list[str], *, has_bias: bool = False, interleaved: bool = False
    ) -> PackedLinear:
        """The map of these weights together: packed if they all are, in one way."""
        found = dict(zip(names, map(self._blocks, names), strict=True))
        return self._linear(found, has_bias=has_bias, interleaved=interleaved)

    def _linear(
        self, found: dict[str, Blocks | None], *, has_bias: bool, interleaved: bool = False
    ) -> PackedLinear:
        names = list(found)
        kinds = set(map(_kind, found.values()))
        parts: list[torch.Tensor | Blocks] = [each for each in found.values() if each is not None]
        if None in kinds or len(kinds) > 1:
            parts = [self._read(name) for name in names]
        biases = [name.removesuffix("weight") + "bias" for name in names] if has_bias else []
        linear = PackedLinear(
            parts,
            self._shapes[names[0]][1],
            dtype=self._dtype,
            biases=[self._read(name) for name in biases],
            interleaved=interleaved,
            compact=self._compact,
            memory=self._memory,
        )
        self.linears.append(linear)
        return linear

    def vector(self, name: str) -> int:
        """The address of a tensor [hidden_size], as float32."""
        vector = self._read(name).float().clone().contiguous()
        self.vectors.append(vector)
        return vector.data_ptr()


def _kind(blocks: Blocks | None) -> str | None:
    """How a weight stays packed, if it does."""
    return None if blocks is None or blocks.kind not in BLOCK_FORMATS else blocks.kind
