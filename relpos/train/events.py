# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's event files, written without TensorBoard.

file      a record for each event
record    length (u64), its check (u32), the event, the event's check (u32); little-endian
check     CRC-32C, turned right by 15 bits, plus 0xa282ead8
event     protocol buffer: 1 wall time (double), 2 step (varint), 3 version, or 5 a summary
summary   1, for each value: 1 its tag (string), 2 the number (float)
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from relpos.data.files import named

_LARGEST = float.fromhex("0x1.fffffep127")  # of float32


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC = _table()


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC-32. Events are some hundred bytes: a loop will do."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _check(data: bytes) -> bytes:
    crc = crc32c(data)
    turned = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (turned + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _field(number: int, content: bytes) -> bytes:
    """A string, or a message within a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


class Events:
    """Appends scalars to a new event file in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = path / name
        self._file = self._path.open("xb")
        self._record(now, _field(3, b"brain.Event:2"))

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Numbers by their tags; those that are not finite in float32 are left out."""
        summary = b"".join(
            _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in values.items()
            if value is not None and abs(value) <= _LARGEST
        )
        try:
            self._record(time.time(), b"\x10" + _varint(step) + _field(5, summary))
            self._file.flush()
        except OSError as error:
            raise named(error, self._path) from error

    def _record(self, now: float, rest: bytes) -> None:
        event = b"\x09" + struct.pack("<d", now) + rest
        length = struct.pack("<Q", len(event))
        self._file.write(length + _check(length) + event + _check(event))

    def close(self) -> None:
        """Nothing more comes."""
        with suppress(OSError):  # all is written, or why it is not has been told
            self._file.close()
