"""One module for each engine. It runs in that engine's own interpreter, so none imports more than
its library, the standard library and `serving`.
"""
