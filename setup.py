"""Builds the extensions in C++; everything else is in pyproject.toml.

Where there is no compiler the package is installed without them: grammars run in Python, and models
in torch.
"""

import os
import platform
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ParallelCompile("PALMETTE_BUILD_JOBS", default=0).install()

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
# Which of them a processor can run is asked when it is known.
PROCESSOR_FLAGS = {
    "kernels_avx2.cpp": ["-mavx2", "-mfma"],
    "kernels_avx512.cpp": AVX512,
    "kernels_avx512_vnni.cpp": [*AVX512, "-mavx512vnni"],
    "kernels_avx512_bf16.cpp": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
}


class BuildWithProcessorFlags(build_ext):
    """Compiles some files for processors that have more than the common ground."""

    def build_extensions(self):
        compile_one = self.compiler._compile

        def compile_for_its_processor(obj, source, ext, cc_args, extra_args, pp_opts):
            if platform.machine() in ("x86_64", "AMD64"):
                extra_args = [*extra_args, *PROCESSOR_FLAGS.get(Path(source).name, [])]
            compile_one(obj, source, ext, cc_args, extra_args, pp_opts)

        self.compiler._compile = compile_for_its_processor
        super().build_extensions()


def extension(name, folder):
    return Pybind11Extension(
        name,
        sorted(glob(f"{folder}/*.cpp")),
        depends=sorted(glob(f"{folder}/*.hpp") + glob(f"{folder}/*.inl")),
        cxx_std=17,
        # Types of 64 bytes are passed within one file only. Whoever wants to see that all compiles,
        # and not to run it, need not wait for the optimiser.
        extra_compile_args=[
            os.environ.get("PALMETTE_BUILD_OPTIMISATION", "-O3"),
            "-Wall",
            "-Wextra",
            "-Wno-psabi",
        ],
        optional=True,
    )


setup(
    ext_modules=[
        extension("palmette.grammar._native", "grammar/native"),
        extension("palmette.runtime._native", "runtime/native"),
    ],
    cmdclass={"build_ext": BuildWithProcessorFlags},
)
