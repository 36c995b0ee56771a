"""The HTTP server: the OpenAI API over any token backend."""

from palmette.runtime.server.app import create_app
from palmette.runtime.server.limits import ServerLimits
from palmette.runtime.server.serve import serve, serve_backend

__all__ = ["ServerLimits", "create_app", "serve", "serve_backend"]
