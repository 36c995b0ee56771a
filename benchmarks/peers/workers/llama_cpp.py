"""llama.cpp by the low-level interface of llama-cpp-python, used as well as its user can.

Requests at once are sequences of one batch. What prompts share is computed once, and its keys and
values given to all sequences; chats keep theirs between turns, and forks share their trunk's. The
library does none of this by itself: `llama_memory_seq_cp` is called here where it pays.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.workers.serving import Answer, Ids, Peer, Unsupported, common_beginning, serve

_BATCH = 2048
_WORTH_SHARING = 32  # ids
# Room in the two contexts: of all sequences together, and of each apart.
_NUM_TOGETHER, _IDS_TOGETHER = 96, 8192
_NUM_APART, _IDS_APART = 32, 640

# An id, its place, the sequence it belongs to, and whether its logits are wanted.
Entry = tuple[int, int, int, bool]
# Reads the logits of an entry or part, given its index and its row in the batch.
Read = Callable[[int, int], Any]


class LlamaCpp(Peer):
    weights = "packed"

    def __init__(self, options: Answer) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        self._grammars: Any = importlib.import_module("llama_cpp.llama_grammar")
        self._np: Any = importlib.import_module("numpy")
        lib = self._lib
        lib.llama_backend_init()
        path, self._kind = Path(options["model"]), options.get("requantise", "")
        if self._kind:
            path = self._requantised(path, Path(options["work_dir"]))
        self._model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("the model cannot be loaded")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._num_ids = lib.llama_vocab_n_tokens(self._vocab)
        self._stop_ids = options["stop_ids"]
        self._threads = options["threads"]
        self._batch = lib.llama_batch_init(_BATCH, 0, 1)
        # Sequences that share have their cells together. Those that do not are better off apart,
        # where each looks only at its own.
        self._together = self._new_context(_NUM_TOGETHER, _IDS_TOGETHER, unified=True)
        self._apart = self._new_context(_NUM_APART, _NUM_APART * _IDS_APART, unified=False)
        self._begin(self._together)

    def about(self) -> dict[str, str]:
        told = self._lib.llama_print_system_info().decode().replace(" : ", "|").split("|")
        parts = [part.strip() for part in told]
        return {
            "llama-cpp-python": self._lib.__version__,
            "blocks": self._kind or "the file's",
            "Python": platform.python_version(),
            "with": " ".join(p.removesuffix(" = 1") for p in parts if p.endswith(" = 1")),
        }

    def reset(self) -> None:
        self._begin(self._together)

    def stream(self, prompt: Ids, num_tokens: int) -> tuple[list[int], float]:
        start = time.perf_counter()
        ids = self._compute([(0, prompt)], self._likeliest)
        first = time.perf_counter() - start
        while len(ids) < num_tokens:
            ids += self._compute([(0, ids[-1:])], self._likeliest)
        return ids, first

    def generate(self, prompts: Sequence[Ids], num_tokens: int) -> list[list[int]]:
        return self._continue(self._placed(prompts), num_tokens)

    def chat(self, turns: Sequence[Sequence[Ids]], num_tokens: int) -> list[list[int]]:
        self._begin(self._apart)
        answers = []
        left: list[list[int]] = [[] for _ in turns]  # drawn, and not computed yet
        for each in zip(*turns, strict=True):
            parts = [(i, [*left[i], *turn]) for i, turn in enumerate(each)]
            found = self._continue(parts, num_tokens)
            answers += found
            left = [answer[-1:] for answer in found]
        return answers

    def tree(
        self, trunk: Ids, openings: Sequence[Sequence[Ids]], num_tokens: int
    ) -> list[list[int]]:
        self._compute([(0, trunk)])
        answers: list[list[int]] = []
        leaves: list[tuple[int, list[int]]] = [(0, [])]  # a sequence, what is not computed yet
        for level in openings:
            parts = []
            for sequence, left in leaves:
                for branch, opening in enumerate(level):
                    target = sequence + branch * len(leaves)
                    if branch:
                        self._copy(sequence, target)
                    parts.append((target, [*left, *opening]))
            found = self._continue(parts, num_tokens)
            answers += found
            leaves = [
                (target, answer[-1:]) for (target, _), answer in zip(parts, found, strict=True)
            ]
        return answers

    def fill_in(self, prompts: Sequence[Ids], schema: Any, max_tokens: int) -> list[Answer]:
        lib = self._lib
        grammar = self._grammars.json_schema_to_gbnf(json.dumps(schema)).encode()
        samplers = []
        try:
            for _ in prompts:
                samplers.append(
                    lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
                )
                rules = lib.llama_sampler_init_grammar(self._vocab, grammar, b"root")
                if not rules:
                    raise Unsupported("this schema")
                lib.llama_sampler_chain_add(samplers[-1], rules)
                lib.llama_sampler_chain_add(samplers[-1], lib.llama_sampler_init_greedy())
            return self._fill_in(prompts, samplers, max_tokens)
        finally:
            for sampler in samplers:
                lib.llama_sampler_free(sampler)

    def _fill_in(
        self, prompts: Sequence[Ids], samplers: Sequence[Any], max_tokens: int
    ) -> list[Answer]:
        ids: list[list[int]] = [[] for _ in prompts]
        running = list(range(len(prompts)))
        parts = self._placed(prompts)
        sequences = [sequence for sequence, _ in parts]
        while running:

            def draw(index: int, row: int, running: Sequence[int] = tuple(running)) -> None:
                which = running[index]
                token_id = self._lib.llama_sampler_sample(samplers[which], self._context, row)
                ids[which].append(token_id)

            self._compute(parts, draw)
            running = [i for i in running if len(ids[i]) < max_tokens and not self._ends(ids[i])]
            parts = [(sequences[i], ids[i][-1:]) for i in running]
        return [{"text": self._text(each), "num_tokens": len(each)} for each in ids]

    def _ends(self, ids: Ids) -> bool:
        """Whether an object is complete: its grammar would go on with white space."""
        if ids[-1] in self._stop_ids:
            return True
        if "}" not in self._text(ids[-1:]):
            return False
        try:
            json.loads(self._text(ids))
        except ValueError:
            return False
        return True

    def score(self, prompts: Sequence[Ids], options: Sequence[Sequence[Ids]]) -> list[list[float]]:
        """Questions in groups, each in a sequence of its own behind what all share, and another for
        each of its options.
        """
        num_options = max(map(len, options))
        at_once = (_NUM_TOGETHER - 1) // num_options
        shared = common_beginning(prompts)
        self._compute([(0, prompts[0][:shared])])
        found: list[list[float]] = []
        for first in range(0, len(prompts), at_once):
            for sequence in range(1, _NUM_TOGETHER):
                self._drop(sequence)
            group = range(first, min(first + at_once, len(prompts)))
            homes = [1 + index * num_options for index in range(len(group))]
            for home in homes:
                self._copy(0, home)
            parts = [(home, prompts[i][shared:]) for home, i in zip(homes, group, strict=True)]

            def begun(index: int, row: int, group: Sequence[int] = group) -> list[float]:
                logprobs = self._logprobs(row)
                return [float(logprobs[option[0]]) for option in options[group[index]]]

            totals = self._compute(parts, begun)
            entries: list[Entry] = []
            following: list[tuple[int, int, int]] = []
            for index, (home, i) in enumerate(zip(homes, group, strict=True)):
                for which, option in enumerate(options[i]):
                    if which and len(option) > 1:
                        self._copy(home, home + which)
                    for place, token_id in enumerate(option[:-1], len(prompts[i])):
                        entries.append((token_id, place, home + which, True))
                        following.append((index, which, option[place - len(prompts[i]) + 1]))

            def add(
                at: int,
                row: int,
                following: Sequence[tuple[int, int, int]] = following,
                totals: list[list[float]] = totals,
            ) -> None:
                index, which, token_id = following[at]
                totals[index][which] += float(self._logprobs(row)[token_id])

            self._decode(entries, add)
            found += totals
        return found

    def _requantised(self, path: Path, folder: Path) -> Path:
        """The same model in blocks of another kind, made once by the library itself."""
        made = folder / f"{path.stem}-{self._kind}.gguf"
        if not made.exists():
            params = self._lib.llama_model_quantize_default_params()
            params.ftype = getattr(self._lib, f"LLAMA_FTYPE_MOSTLY_{self._kind}")
            params.allow_requantize = True
            params.nthread = 1
            part = made.with_suffix(".part")
            status = self._lib.llama_model_quantize(
                str(path).encode(), str(part).encode(), ctypes.byref(params)
            )
            if status:
                raise RuntimeError(f"llama_model_quantize says {status}")
            part.rename(made)
        return made

    def _new_context(self, num_sequences: int, num_ids: int, *, unified: bool) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = num_ids
        params.n_seq_max = num_sequences
        params.n_batch = _BATCH
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = unified
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("there is no context")
        return context

    def _begin(self, context: Any) -> None:
        """Go on with this context, and nothing in it."""
        self._context = context
        self._memory = self._lib.llama_get_memory(context)
        self._lib.llama_memory_clear(self._memory, False)
        self._lengths: dict[int, int] = {}
        self._first: list[int] = []  # how sequence 0 begins, where another prompt may come after it

    def _placed(self, prompts: Sequence[Ids]) -> list[tuple[int, Ids]]:
        """Each prompt's sequence, and what of the prompt is not computed yet."""
        if len(prompts) == 1:
            self._begin(self._together)
            self._first = list(prompts[0])
            return [(0, prompts[0])]
        shared = min(common_beginning(prompts), min(map(len, prompts)) - 1)
        if shared < _WORTH_SHARING:
            self._begin(self._apart)
            return list(enumerate(prompts))
        beginning = prompts[0][:shared]
        num_held = common_beginning([self._first, beginning])
        self._lib.llama_memory_seq_rm(self._memory, 0, num_held, -1)
        self._lengths[0] = num_held
        if num_held < shared:
            self._compute([(0, beginning[num_held:])])
        for sequence in range(1, len(prompts)):
            self._copy(0, sequence)
        return [(sequence, prompt[shared:]) for sequence, prompt in enumerate(prompts)]

    def _continue(self, parts: Sequence[tuple[int, Ids]], num_tokens: int) -> list[list[int]]:
        """Compute the parts of their sequences, and what is likeliest behind each."""
        ids = [[token_id] for token_id in self._compute(parts, self._likeliest)]
        for _ in range(num_tokens - 1):
            last = [(sequence, each[-1:]) for (sequence, _), each in zip(parts, ids, strict=True)]
            for each, token_id in zip(ids, self._compute(last, self._likeliest), strict=True):
                each.append(token_id)
        return ids

    def _compute(self, parts: Sequence[tuple[int, Ids]], read: Read | None = None) -> list[Any]:
        """Append the parts to their sequences; what `read` says of the last row of each."""
        entries: list[Entry] = []
        part_of: dict[int, int] = {}
        for index, (sequence, ids) in enumerate(parts):
            length = self._lengths.get(sequence, 0)
            last = len(ids) - 1
            entries += [(t, length + at, sequence, at == last) for at, t in enumerate(ids)]
            part_of[len(entries) - 1] = index
            self._lengths[sequence] = length + len(ids)
        if read is None:
            self._decode(entries, lambda at, row: None)
            return []
        return self._decode(entries, lambda at, row: read(part_of[at], row))

    def _decode(self, entries: Sequence[Entry], read: Read) -> list[Any]:
        """Compute the entries; what `read` says of each whose logits are wanted."""
        batch, found = self._batch, []
        for first in range(0, len(entries), _BATCH):
            some = entries[first : first + _BATCH]
            for row, (token_id, place, sequence, is_wanted) in enumerate(some):
                batch.token[row] = token_id
                batch.pos[row] = place
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence
                batch.logits[row] = is_wanted
            batch.n_tokens = len(some)
            status = self._lib.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode says {status}")
            for row, (_, _, _, is_wanted) in enumerate(some):
                if is_wanted:
                    found.append(read(first + row, row))
        return found

    def _copy(self, source: int, target: int) -> None:
        self._lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self._lengths[target] = self._lengths[source]

    def _drop(self, sequence: int) -> None:
        self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._lengths.pop(sequence, None)

    def _logits(self, row: int) -> Any:
        """A view of them, good until the next batch."""
        pointer = self._lib.llama_get_logits_ith(self._context, row)
        return self._np.ctypeslib.as_array(pointer, shape=(self._num_ids,))

    def _likeliest(self, index: int, row: int) -> int:
        logits = self._logits(row)
        logits[self._stop_ids] = -self._np.inf
        return int(logits.argmax())

    def _logprobs(self, row: int) -> Any:
        logits = self._logits(row)
        shifted = logits - logits.max()
        return shifted - self._np.log(self._np.exp(shifted).sum())

    def _text(self, ids: Ids) -> str:
        buffer = ctypes.create_string_buffer(256)
        pieces = []
        for token_id in ids:
            size = self._lib.llama_token_to_piece(self._vocab, token_id, buffer, 256, 0, False)
            pieces.append(buffer.raw[: max(size, 0)])
        return b"".join(pieces).decode("utf-8", "replace")


if __name__ == "__main__":
    serve(LlamaCpp)
