"""JSON Schema, draft 2020-12: what a schema means, and the terms that spell its instances."""

from palmette.grammar.json_schema.document import Document
from palmette.grammar.json_schema.emit import emit
from palmette.grammar.json_schema.policy import DEFAULT_POLICY, Policy

__all__ = ["DEFAULT_POLICY", "Document", "Policy", "emit"]
