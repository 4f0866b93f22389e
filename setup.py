"""Builds the optional native module; everything else about the package is in pyproject.toml.

gcc or clang is all it needs. What the machine may offer on top (OpenMP, the system's libaio) is found by
compiling and linking a few lines; what is missing costs speed or a link dependency, never the build.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

HIDDEN = ["-fvisibility=hidden"]
CPP_FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
OPENMP_TRIAL = "#include <omp.h>\nint trial() { return omp_get_max_threads(); }\n"
LIBAIO_TRIAL = """
#include <libaio.h>
#include <stddef.h>
_Static_assert(offsetof(struct iocb, key) == 8, "as csrc/tiered.h says");
_Static_assert(offsetof(struct iocb, aio_rw_flags) == 12, "as csrc/tiered.h says");
int trial(io_context_t context) { return io_destroy(context); }
"""


class BuildNative(build_ext):
    """Compiles C and C++ each with its own flags, and links what `_links` finds."""

    def build_extension(self, ext: Extension) -> None:
        openmp = ["-fopenmp"] if self._links(OPENMP_TRIAL, ".cpp", "c++", flags=["-fopenmp"]) else []
        libaio = self._links(LIBAIO_TRIAL, ".c", "c", libraries=["aio"])
        print("tiered: OpenMP", "found" if openmp else "missing, so the kernels use one thread")
        print("tiered: libaio", "found" if libaio else "missing, so csrc/aio.c stands in for it")
        if libaio:
            ext.define_macros.append(("TIERED_SYSTEM_LIBAIO", "1"))
            ext.libraries.append("aio")
        cpp_sources = [source for source in ext.sources if source.endswith(".cpp")]
        ext.sources = [source for source in ext.sources if source not in cpp_sources]
        ext.depends += cpp_sources
        ext.extra_objects += self.compiler.compile(
            cpp_sources,
            output_dir=self.build_temp,
            include_dirs=ext.include_dirs,
            extra_postargs=CPP_FLAGS + HIDDEN + openmp,
        )
        ext.language = "c++"  # of the linker
        ext.extra_compile_args += HIDDEN
        ext.extra_link_args += openmp
        super().build_extension(ext)

    def _links(
        self,
        code: str,
        suffix: str,
        language: str,
        *,
        flags: list[str] | None = None,
        libraries: list[str] | None = None,
    ) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "trial").with_suffix(suffix)
            source.write_text(code)
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
                self.compiler.link_shared_object(
                    objects,
                    "trial.so",
                    output_dir=folder,
                    libraries=libraries,
                    extra_postargs=flags,
                    target_lang=language,
                )
            except (CompileError, LinkError):
                return False
        return True


setup(cffi_modules=["csrc/build.py:ffibuilder"], cmdclass={"build_ext": BuildNative})
