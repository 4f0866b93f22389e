"""The cffi module `tiered._tiered_native`: csrc/tiered.h is its one declaration, for cffi, C and C++.

setup.py compiles it (`cffi_modules`); it holds no compiler probing, that is setup.py's.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

HEADER = Path("csrc/tiered.h")
SOURCES = ["csrc/adam.cpp", "csrc/aio.c", "csrc/io_uring.c"]


def declarations(header: str) -> str:
    """What cffi may parse of a C header: no extern "C", no preprocessor lines."""
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", header, flags=re.DOTALL)
    return re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)


ffibuilder = FFI()
ffibuilder.cdef(declarations(HEADER.read_text()))
ffibuilder.set_source(
    "tiered._tiered_native",
    '#include "tiered.h"',
    sources=SOURCES,
    include_dirs=[str(HEADER.parent)],
    depends=[str(HEADER)],
    optional=True,  # no compiler: the package installs and works without it
)
