"""Positioned reads and writes behind one protocol: libaio, io_uring, aiofiles, and the probe that picks."""
