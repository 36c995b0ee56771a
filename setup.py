"""Builds the machine of the grammar engine in C++; everything else is in pyproject.toml.

Where there is no compiler the package is installed without it, and grammars run in Python.
"""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ParallelCompile("PALMETTE_BUILD_JOBS", default=0).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "palmette.grammar._native",
            sorted(glob("grammar/native/*.cpp")),
            depends=sorted(glob("grammar/native/*.hpp")),
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": build_ext},
)
