"""One run at a time in an output directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from jaxlab.errors import StorageError


@contextlib.contextmanager
def run_lock(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Hold `directory`, which exists, for this process: two runs would delete each other's files.

    The system lets go of it when the process ends, however it ends. Object stores and file systems
    without locks are not guarded.

    Raises:
      StorageError: another run holds the directory, or it cannot be written.
    """
    if "://" in str(directory):
        yield
        return
    path = Path(directory) / ".lock"
    try:
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().decode(errors="replace").strip()
            raise StorageError(
                f"output_dir {directory} is in use by another run (process {owner}): "
                "wait until it has ended, or choose another output_dir"
            ) from error
        except OSError:
            pass  # a file system without locks
        else:
            with contextlib.suppress(OSError):  # only for the message; a full disk is told later
                file.truncate(0)
                file.write(f"{os.getpid()}\n".encode())
        yield
