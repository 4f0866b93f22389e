"""The compiled module: what it reports, and life without it or without the kernel's help."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from tiered import _native

compiled = pytest.mark.skipif(not _native.available(), reason=_native.unavailable_reason())


def run_python(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@compiled
def test_it_says_what_it_is() -> None:
    assert _native.unavailable_reason() == ""
    assert _native.aio_provider() in {"libaio", "system calls", "none"}
    assert _native.kernel_isa() in {"x86-64-v4", "x86-64-v3", "neon", "generic"}


@compiled
def test_kernels_take_addresses() -> None:
    source = numpy.linspace(-3, 3, 1001, dtype=numpy.float32)
    hi, lo = numpy.empty(1001, dtype=numpy.uint16), numpy.empty(1001, dtype=numpy.uint16)
    target = numpy.zeros(1001, dtype=numpy.float32)
    _native.split_f32(1001, source.ctypes.data, hi=hi.ctypes.data, lo=lo.ctypes.data, threads=1)
    _native.join_f32(1001, target.ctypes.data, hi=hi.ctypes.data, lo=lo.ctypes.data, threads=1)
    assert target.tobytes() == source.tobytes()
    _native.accumulate_f32(
        1001,
        target.ctypes.data,
        addend=source.ctypes.data,
        addend_type=_native.ElementType.F32,
        threads=2,
    )
    assert target.tobytes() == (source + source).tobytes()


@compiled
def test_every_wrapper_names_a_compiled_function() -> None:
    """The one place besides _native that looks at the compiled module: nothing is declared and not bound."""
    source = Path(_native.__file__).read_text()
    functions = [name for name in dir(_native._module.lib) if name.islower()]
    assert functions
    assert [name for name in functions if name not in source] == []


_WITHOUT_THE_MODULE = """
import sys
from pathlib import Path
sys.modules["tiered._tiered_native"] = None
from tiered import _native
from tiered.errors import ConfigError, UsageError
from tiered.tiers.io.probe import open_engine, probe
assert not _native.available()
assert "no compiled module" in _native.unavailable_reason()
for call in (_native.kernel_isa, lambda: _native.UringRing(4, 0), lambda: open_engine("libaio", 4)):
    try:
        call()
    except (UsageError, ConfigError) as error:
        assert "no compiled module" in str(error)
    else:
        raise AssertionError(call)
result = probe(Path(sys.argv[1]), queue_depth=4, block_bytes=1 << 16)
assert result.engine == "aiofiles", result
assert result.reason.count("no compiled module") == 1, result
assert result.reason.count("\\n") == 0, result
"""


def test_without_the_module_aiofiles_works(tmp_path: Path) -> None:
    run_python(_WITHOUT_THE_MODULE, tmp_path)


# A seccomp filter that answers EPERM to one system call: what containers do to io_uring.
_FORBIDDEN = """
import ctypes, struct, sys
from pathlib import Path
from tiered.errors import ConfigError
from tiered.tiers.io.probe import open_engine, probe
def forbid(number):
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(text)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, a filter
for number, name, left in ((425, "io_uring", "libaio"), (int(sys.argv[2]), "libaio", "aiofiles")):
    forbid(number)
    try:
        open_engine(name, 4)
    except ConfigError as error:
        assert "forbidden" in str(error), error
    else:
        raise AssertionError(name)
    result = probe(Path(sys.argv[1]), queue_depth=4, block_bytes=1 << 16)
    assert result.engine == left or not result.direct, result
    assert f'"{name}" cannot work here' in result.reason, result
    print(result.reason)
"""


@compiled
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="knows its system calls")
def test_forbidden_system_calls_are_a_reason_not_a_crash(tmp_path: Path) -> None:
    run_python(_FORBIDDEN, tmp_path, 206)
