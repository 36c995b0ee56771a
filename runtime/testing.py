"""What tests and benchmarks need: small engines, and transformers on the weights of a real model.

The small engines use the byte tokenizer: one has logits that are a function of the prompt, one has
random weights. Public, so that programs and servers over Palmette can be tested without a model.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from typing_extensions import Unpack

from palmette.errors import EngineError
from palmette.runtime.config import EngineConfig, EngineOptions
from palmette.runtime.engine import Engine, EngineTokenizer
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.loading import LoadedModel
from palmette.runtime.models.config import ModelConfig, RopeConfig
from palmette.runtime.models.llama import LlamaModel, tensor_shapes
from palmette.runtime.sampling import SampledToken, Sampler, SamplingRow
from palmette.runtime.tokenization.byte import ByteTokenizer

Logits = Callable[[tuple[int, ...]], Mapping[int, float]]
"""From all tokens so far to the logits of the next; ids that are left out have a logit of 0."""


class HistoryModel:
    """A model whose logits are `logits_of` the tokens that it reads back from the pages.

    It writes each token's id where its key would be, so wrong pages, slots or copies show as a
    wrong history. `num_computed` counts the rows of all batches, `batch_sizes` lists them.
    """

    def __init__(self, logits_of: Logits, vocab_rows: int) -> None:
        self._logits_of = logits_of
        self.vocab_rows = vocab_rows
        self.batch_sizes: list[int] = []

    @property
    def num_computed(self) -> int:
        return sum(self.batch_sizes)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """[R, vocab_rows]"""
        self.batch_sizes.append(batch.num_tokens)
        token_ids, _, slots, _ = batch.tensors(kv.device)
        ids = token_ids.to(kv.dtype)[:, None, None]  # [T, 1, 1]
        kv.write(0, slots, ids.expand(-1, 2, 1))
        logits = torch.zeros(len(batch.logit_rows), self.vocab_rows)
        for index, row in enumerate(batch.logit_rows):
            sequence = next(
                i for i in range(batch.num_sequences) if row < batch.query_starts[i + 1]
            )
            length = batch.positions[row] + 1
            num_pages = -(-length // kv.page_size)
            read = kv.reader(batch.page_tables[sequence][:num_pages]).read(0)
            history = tuple(read[0, 0, :length, 0].long().tolist())
            if found := self._logits_of(history):
                logits[index, list(found)] = torch.tensor(list(found.values()))
        return logits


def history_engine(
    logits_of: Logits,
    *,
    tokenizer: EngineTokenizer | None = None,
    vocab_rows: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Unpack[EngineOptions],
) -> tuple[Engine, HistoryModel]:
    """An engine over a `HistoryModel`, and that model."""
    tokenizer = tokenizer or ByteTokenizer()
    rows = vocab_rows or tokenizer.vocab_size
    model = HistoryModel(logits_of, rows)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_rows=rows,
        hidden_size=2,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_context=4096,
        tie_word_embeddings=True,
    )
    loaded = LoadedModel(
        model=cast(LlamaModel, model),
        config=config,
        dtype=torch.float32,
        dtype_reason="a history model stores token ids",
        path=Path("history"),
        num_weight_bytes=0,
        weights_digest="history",
    )
    return Engine.assemble("history", loaded, tokenizer, _config(options), clock), model


def script(text: str, *, then: int | None = 258) -> Logits:
    """Logits that spell `text` after any prompt that ends with a newline or holds one, whatever
    stands before its last newline; then token `then`, by default the end of the turn.
    """
    wanted = [*text.encode(), *([] if then is None else [then])]

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        done = list(itertools.takewhile(lambda token_id: token_id != 10, reversed(history)))
        step = min(len(done), len(wanted) - 1)
        return {wanted[step]: 20.0}

    return logits_of


def tiny_model(*, seed: int = 0, **changes: Any) -> LoadedModel:
    """A Llama with random float32 weights, spread so that its distributions are neither flat nor
    certain. `changes` replace fields of its ModelConfig.
    """
    return _tiny_model(seed, changes)[0]


def tiny_twin(*, seed: int = 0, **changes: Any) -> Any:
    """transformers' LlamaForCausalLM with the weights of `tiny_model` of the same arguments."""
    loaded, weights = _tiny_model(seed, changes)
    return _twin(loaded.config, weights.__getitem__, torch.float32)


def _tiny_model(
    seed: int, changes: Mapping[str, Any]
) -> tuple[LoadedModel, dict[str, torch.Tensor]]:
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_rows": 272,  # more than the byte tokenizer has, as padded heads are
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_context": 2048,
        "tie_word_embeddings": True,
    }
    config = ModelConfig(**{**fields, **changes})
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(config)
    digest = hashlib.sha256()
    weights: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        shape = shapes[name]
        if "norm" in name:
            tensor = torch.ones(shape)
        else:
            tensor = torch.randn(shape, generator=generator) * (0.7 if len(shape) == 2 else 0.1)
            digest.update(tensor.numpy().data)
        weights[name] = tensor.clone()
        return tensor

    model = LlamaModel(config, read, dtype=torch.float32)
    loaded = LoadedModel(
        model=model,
        config=config,
        dtype=torch.float32,
        dtype_reason="a tiny model is float32",
        path=Path("tiny"),
        num_weight_bytes=model.num_weight_bytes,
        weights_digest=digest.hexdigest(),
    )
    return loaded, weights


def tiny_engine(*, seed: int = 0, **options: Unpack[EngineOptions]) -> Engine:
    """An engine over `tiny_model(seed=seed)`."""
    return Engine.assemble("tiny", tiny_model(seed=seed), ByteTokenizer(), _config(options))


Listener = Callable[
    [torch.Tensor, Sequence[SamplingRow], Sequence[SampledToken | EngineError]], None
]
"""Is told the logits [R, vocab_rows] of a draw, their rows, and what was answered for each."""


def on_draws(engine: Engine, listener: Listener) -> None:
    """Have `listener` told of every draw of the engine from now on."""
    worker = engine._worker
    worker.sampler = _OverheardSampler(worker.sampler, listener)


class _OverheardSampler(Sampler):
    def __init__(self, sampler: Sampler, listener: Listener) -> None:
        super().__init__(vocab_size=sampler.vocab_size, vocab_rows=sampler.vocab_rows)
        self._listener = listener

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> list[SampledToken | EngineError]:
        answers = super().sample(logits, rows)
        self._listener(logits, rows, answers)
        return answers


def transformers_twin(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' LlamaForCausalLM with the weights of a GGUF file, dequantised to `dtype`.

    Config, attention, cache and rotary embedding are transformers' own.
    """
    from palmette.runtime.loading.gguf_model import GGUFModel

    source = GGUFModel(path)
    return _twin(source.config, source.read, dtype)


def _twin(config: ModelConfig, read: Callable[[str], torch.Tensor], dtype: torch.dtype) -> Any:
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_rows,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_context,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_word_embeddings,
            pad_token_id=0,
        )
    ).to(dtype)
    weights = {name: read(name).to(dtype) for name in tensor_shapes(config)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"transformers wants other tensors: {missing}, {unexpected}")
    model.tie_weights()
    return model.eval()


def _config(options: EngineOptions) -> EngineConfig:
    return EngineConfig.of({"num_pages": 256, **options})
