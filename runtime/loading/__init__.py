"""From a model file or folder to a model in memory."""

from palmette.runtime.loading.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
