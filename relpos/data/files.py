# SPDX-License-Identifier: Apache-2.0
"""Small files, written whole or not at all, and a folder for one writer at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_file(path: Path, content: bytes) -> None:
    """Under another name first; a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            sync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise named(error, path) from error
    sync_path(path.parent)


def write_output(path: Path, content: bytes) -> None:
    """A file that somebody has named. Where it takes the place of another of theirs, whole or not at
    all; links, devices and pipes are written through."""
    there = os.lstat(path) if os.path.lexists(path) else None
    try:
        if there is not None and _may_be_replaced(path, there):
            with suppress(PermissionError):  # of the folder: the file itself may be written
                return _replace(path, content, stat.S_IMODE(there.st_mode))
        with open(path, "wb") as file:
            file.write(content)
    except OSError as error:
        if there is None:
            with suppress(OSError):
                path.unlink()
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error


def _may_be_replaced(path: Path, there: os.stat_result) -> bool:
    """By another one, which nobody can tell from it."""
    alone = stat.S_ISREG(there.st_mode) and there.st_nlink == 1
    return alone and there.st_uid == os.geteuid() and os.access(path, os.W_OK)


def _replace(path: Path, content: bytes, mode: int) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=".relpos-", dir=path.parent)
    with open(descriptor, "wb") as file:
        try:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)
            sync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """A file's content, or a folder's names: they survive a crash of the machine as well."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def named(error: OSError, path: Path) -> OSError:
    """The same error with its file: writing to a full disk tells none."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, os.strerror(error.errno), os.fspath(path))


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone in the folder: another process, or thread, waits."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
