"""Files that are replaced whole or not at all. Everyone may import this."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from zest_jax.errors import UserError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when the block has ended well.

    After a kill at any moment, or on a full disk, the name stands for the old file or the new one,
    whole; what a kill leaves over begins with a dot and the name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def check_writable(path: Path) -> None:
    """Refuses a file that could not be written, before there is anything to write; makes its
    folder.

    Raises:
      UserError: it is a folder, or its folder cannot be made or written to.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file to write to.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise UserError(f"{path} cannot be written ({why}); name another place.") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut; some file systems refuse, which is no error."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
