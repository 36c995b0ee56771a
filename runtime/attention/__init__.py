"""Attention over paged keys and values: the interface, a plain reference, the torch backend."""

from palmette.runtime.attention.backend import AttentionBackend, AttentionPlan
from palmette.runtime.attention.reference import ReferenceAttention
from palmette.runtime.attention.torch_backend import TorchAttention

__all__ = ["AttentionBackend", "AttentionPlan", "ReferenceAttention", "TorchAttention"]
