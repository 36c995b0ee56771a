"""The Llama family (Llama 2 and 3, SmolLM2, Mistral): weights it needs and its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from palmette.runtime.attention import AttentionBackend, AttentionPlan, TorchAttention
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.layers.linear import Linear, LinearMap, MakeLinear
from palmette.runtime.layers.rotary import RotaryTable, rotate
from palmette.runtime.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model needs, by its Hugging Face name. A tied head is not among them."""
    h, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_rows, h)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        for part, rows, columns, has_bias in (
            ("self_attn.q_proj", config.q_size, h, config.attention_bias),
            ("self_attn.k_proj", config.kv_size, h, config.attention_bias),
            ("self_attn.v_proj", config.kv_size, h, config.attention_bias),
            ("self_attn.o_proj", h, config.q_size, config.attention_bias),
            ("mlp.gate_proj", inner, h, config.mlp_bias),
            ("mlp.up_proj", inner, h, config.mlp_bias),
            ("mlp.down_proj", h, inner, config.mlp_bias),
        ):
            shapes[f"{layer}{part}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}{part}.bias"] = (rows,)
        shapes[f"{layer}input_layernorm.weight"] = (h,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (h,)
    shapes[FINAL_NORM] = (h,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_rows, h)
    return shapes


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor  # [hidden]
    query_key_value: LinearMap
    attention_output: LinearMap
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: LinearMap
    down: LinearMap

    @property
    def num_bytes(self) -> int:
        linears = (self.query_key_value, self.attention_output, self.gate_up, self.down)
        return (
            sum(linear.num_bytes for linear in linears)
            + self.attention_norm.nbytes
            + self.mlp_norm.nbytes
        )


class LlamaModel:
    """Token ids to logits, over paged keys and values.

    `read(name)` gives a tensor of `tensor_shapes(config)` in any float type; each is asked for
    once and in layer order, so that a loader need not hold them all. Weights are kept in `dtype`;
    norms, rotary embedding and softmax compute in float32.

    `attention` and `linear` are how sums over many terms are computed. Everything else treats each
    row, or each number, alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Callable[[str], torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        attention: AttentionBackend | None = None,
        linear: MakeLinear = Linear,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self._attention = attention or TorchAttention()

        def tensor(name: str) -> torch.Tensor:
            return read(name).to(self.device, dtype)

        def joined(*names: str, has_bias: bool, scales: tuple[float, ...] = ()) -> LinearMap:
            # Joining copies even a single tensor, so no weight stays a view of the file.
            def join(part: str) -> torch.Tensor:
                parts = [read(f"{name}.{part}") for name in names]
                for k, scale in enumerate(scales):
                    parts[k] = parts[k].float() * scale
                return torch.cat([part.to(self.device, dtype) for part in parts])

            return linear(join("weight"), join("bias") if has_bias else None)

        with torch.inference_mode():
            self._embedding = torch.cat([tensor(EMBEDDING)])  # [vocab_rows, hidden]
            self._layers = []
            for i in range(config.num_layers):
                layer = f"model.layers.{i}."
                attn, mlp = layer + "self_attn.", layer + "mlp."
                self._layers.append(
                    _Layer(
                        attention_norm=torch.cat([tensor(layer + "input_layernorm.weight")]),
                        query_key_value=joined(
                            attn + "q_proj",
                            attn + "k_proj",
                            attn + "v_proj",
                            has_bias=config.attention_bias,
                            # Scaling the query weights saves scaling every query.
                            scales=(config.head_dim**-0.5,),
                        ),
                        attention_output=joined(attn + "o_proj", has_bias=config.attention_bias),
                        mlp_norm=torch.cat([tensor(layer + "post_attention_layernorm.weight")]),
                        gate_up=joined(
                            mlp + "gate_proj", mlp + "up_proj", has_bias=config.mlp_bias
                        ),
                        down=joined(mlp + "down_proj", has_bias=config.mlp_bias),
                    )
                )
            self._final_norm = torch.cat([tensor(FINAL_NORM)])  # [hidden]
            head = self._embedding if config.tie_word_embeddings else torch.cat([tensor(HEAD)])
            self._head = linear(head)
            self._rotary = RotaryTable(
                config.rope, config.head_dim, config.max_context, self.device
            )

    @property
    def is_batch_invariant(self) -> bool:
        """A promise: the logits of a token have the same bits whatever the rest of the batch, the
        chunks in which what is before it was computed, and the number of threads.
        """
        maps = [self._head]
        for layer in self._layers:
            maps += [layer.query_key_value, layer.attention_output, layer.gate_up, layer.down]
        return self._attention.is_batch_invariant and all(m.is_batch_invariant for m in maps)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes held for weights, with a tied head's second layout counted where there is one."""
        held = self._embedding.nbytes + self._final_norm.nbytes
        held += sum(layer.num_bytes for layer in self._layers)
        return held + (self._head.num_bytes if not self._shares_head else 0)

    @property
    def _shares_head(self) -> bool:
        return self._head.shares_memory_with(self._embedding)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Logits of `batch.logit_rows` [R, vocab_rows] float32; keys and values go into `kv`."""
        plan = self._attention.plan(batch, kv, self.config.num_heads)
        token_ids, positions, slots, logit_rows = batch.tensors(self.device)
        cos, sin = self._rotary.rows(positions, max(batch.context_lengths))
        hidden = F.embedding(token_ids, self._embedding)  # [T, hidden]
        last = self.config.num_layers - 1
        for i, layer in enumerate(self._layers):
            attended = self._attend(i, layer, hidden, cos, sin, slots, kv, plan)
            if i == last:  # what follows concerns each row alone
                hidden = hidden.index_select(0, logit_rows)
                attended = attended.index_select(0, logit_rows)
            hidden = layer.attention_output.plus(attended, hidden)
            hidden = self._feed_forward(layer, hidden)
        return self._head.in_float32(self._norm(hidden, self._final_norm))

    def _attend(
        self,
        index: int,
        layer: _Layer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KVPool,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Attention before its output map. [T, num_heads * head_dim]"""
        config = self.config
        num_turned = config.num_heads + config.num_kv_heads
        heads = layer.query_key_value(self._norm(hidden, layer.attention_norm))
        heads = heads.view(len(hidden), num_turned + config.num_kv_heads, config.head_dim)
        turned = heads[:, :num_turned]
        turned.copy_(rotate(turned, cos, sin))
        kv.write(index, slots, heads[:, config.num_heads :])
        attended = plan.attend(index, heads[:, : config.num_heads])
        return attended.reshape(len(hidden), config.q_size)

    def _feed_forward(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down.plus(F.silu(gate).mul_(up), hidden)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)
