"""Text to token ids and back, chat templates, and output as it streams. No torch."""

from __future__ import annotations

from palmette.runtime.tokenization.byte import ByteTokenizer
from palmette.runtime.tokenization.chat import JinjaChatTemplate
from palmette.runtime.tokenization.output import OutputBuffer
from palmette.runtime.tokenization.source import load_tokenizer
from palmette.runtime.tokenization.stream import StopMatch, StopMatcher, StreamDecoder
from palmette.runtime.tokenization.tokenizer import LoadedTokenizer

__all__ = [
    "ByteTokenizer",
    "JinjaChatTemplate",
    "LoadedTokenizer",
    "OutputBuffer",
    "StopMatch",
    "StopMatcher",
    "StreamDecoder",
    "load_tokenizer",
]
