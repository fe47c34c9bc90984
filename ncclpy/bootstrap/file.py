"""A store in a folder, of this machine or of a network file system."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import secrets
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from typing import BinaryIO

from ncclpy.bootstrap.folder_watch import FolderWatch, is_local
from ncclpy.bootstrap.local import changed, refuse_reentry, summed
from ncclpy.bootstrap.store import MAX_VALUE, TIMEOUT, Store, StoreError
from ncclpy.bootstrap.store_arguments import MAX_KEY
from ncclpy.bootstrap.watch import SLICE
from ncclpy.errors import NcclTimeout
from ncclpy.ownership import ForeignFile, open_own, why_foreign

__all__ = ["FileStore"]

log = logging.getLogger("ncclpy")

#: Names in a store's folder: the file with the writers' lock, the file that each process with the store open has a
#: shared lock on, the folder of the keys, and the prefix of files that are not completely written.
MARK, ALIVE, KEYS, UNFINISHED = "ncclpy-store", "alive", "keys", "new-"

_open_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


class FileStore(Store):
    """Keep keys in files of a folder, for processes that share a file system and need no address.

    A value is written to a temporary file in the folder, which is then renamed, so that readers see the value whole.
    Writers take turns by a lock of the file system, which is released when the process that holds it ends. The store
    exists as long as a process has it open: the last process to close it deletes it, and the next process to open it
    deletes what killed processes have left.

    On a file system of this machine, inotify wakes waiting threads. On other file systems, and where the user has no
    inotify instance left, they poll the folder 50 times a second. A network file system has to pass locks on to its
    server, as NFS does unless it is mounted with ``nolock``.

    Parameters
    ----------
    path
        The folder. If it is absent it is made, for this user alone. It is refused if it has files and none of them is
        of a store, if it belongs to another user, if other users can write to it, or if it is a symbolic link.
    timeout
        Default seconds that an operation may take.

    Raises
    ------
    StoreError
        If the folder has files of which none is of a store, is not this user's alone, or is a file.
    NcclTimeout
        If another process, which may be stopped, holds the store's lock until the deadline.
    """

    def __init__(self, path: str | os.PathLike[str], timeout: float = TIMEOUT) -> None:
        super().__init__(timeout)
        self.path = os.path.abspath(os.fspath(path))
        self._keys_folder = os.path.join(self.path, KEYS)
        self._thread_lock = threading.RLock()
        # Part of the names of unfinished files. The random part differs if a later process gets the same pid.
        self._unfinished_id = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._lock_fd = self._alive_fd = -1
        _open_stores.add(self)  # before it opens descriptors that a forked child has to close
        self._open_folder(self._deadline(None))
        self._local = is_local(self.path)

    def __repr__(self) -> str:
        return f"FileStore({self.path!r})"

    def _check_usable(self) -> None:
        super()._check_usable()
        refuse_reentry(self, self._thread_lock)

    # Opening and closing.

    def _open_folder(self, deadline: float) -> None:
        """Join the store; the first process deletes what an earlier run has left."""
        mark = os.path.join(self.path, MARK)
        while True:
            try:
                os.makedirs(self.path, 0o700, exist_ok=True)
                self._check_folder(self.path)
                entries_found = os.listdir(self.path)
                if entries_found and MARK not in entries_found:
                    raise StoreError(
                        f"{self}: the folder holds something else than a store ({entries_found[0]!r}); choose another"
                    )
                self._lock_fd = open_own(mark, os.O_RDWR | os.O_CREAT)
            except ForeignFile as error:
                raise StoreError(f"{self}: {error}") from None
            except (FileExistsError, NotADirectoryError) as error:
                is_file = os.path.lexists(error.filename) and not os.path.isdir(error.filename)
                if isinstance(error, FileExistsError) and not is_file:
                    continue  # the folder existed in makedirs, but the last process to close the store has deleted it
                raise StoreError(f"{self}: {error.filename!r} is a file, and a store is a folder") from None
            except FileNotFoundError:
                continue  # the last process to close the store has just deleted it
            try:
                with self._locked(deadline):
                    if _same_file(self._lock_fd, mark):
                        self._mark_as_open()
                        return
                # The descriptors are closed only after the block, since the block ends with an unlock of a descriptor:
                # once that is closed, another thread may get its number for the lock of another store.
                self._close_descriptors()
            except BaseException:
                self._close_descriptors()
                raise

    def _check_folder(self, path: str) -> None:
        why = why_foreign(path)
        if why:
            raise StoreError(
                f"{self}: {path} {why}. The folder of a store belongs to the user of all its ranks, and no other "
                "user may write to it: give a path that does not exist yet, or make the folder (mkdir -m 700)"
            )

    def _mark_as_open(self) -> None:
        try:
            self._alive_fd = open_own(os.path.join(self.path, ALIVE), os.O_RDWR | os.O_CREAT)
        except ForeignFile as error:
            raise StoreError(f"{self}: {error}") from None
        if _try_lock(self._alive_fd, fcntl.LOCK_EX):  # no other process has the store open
            leftovers = os.listdir(self._keys_folder) if os.path.isdir(self._keys_folder) else []
            if leftovers:
                log.warning("%s: removing %d keys that an earlier run left behind", self, len(leftovers))
            self._clear()
            with contextlib.suppress(FileExistsError):  # _clear() could not delete the folder
                os.mkdir(self._keys_folder, 0o700)
        self._check_folder(self._keys_folder)
        fcntl.flock(self._alive_fd, fcntl.LOCK_SH)

    def _close(self) -> None:
        _open_stores.discard(self)
        try:
            with self._locked(time.monotonic() + 5.0, closing=True):
                if _try_lock(self._alive_fd, fcntl.LOCK_EX):  # no other process has the store open
                    self._clear()
                    for name in (ALIVE, MARK):
                        with contextlib.suppress(OSError):
                            os.unlink(os.path.join(self.path, name))
                    with contextlib.suppress(OSError):
                        os.rmdir(self.path)
        except NcclTimeout:
            pass  # nothing is deleted here: the process that closes the store last does it
        finally:
            self._close_descriptors()

    def _clear(self) -> None:
        """Delete all keys, and the unfinished files of killed processes."""
        shutil.rmtree(self._keys_folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder is gone
            for name in os.listdir(self.path):
                if name.startswith(UNFINISHED):
                    os.unlink(os.path.join(self.path, name))

    def _close_descriptors(self) -> None:
        for fd in (self._lock_fd, self._alive_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._lock_fd = self._alive_fd = -1

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._alive_fd >= 0:
            self.close()

    # Locks and files.

    @contextlib.contextmanager
    def _locked(self, deadline: float, closing: bool = False) -> Iterator[None]:
        """Hold the lock that lets one thread of one process write."""
        while not self._thread_lock.acquire(timeout=max(0.0, min(SLICE, deadline - time.monotonic()))):
            if self._closed and not closing:
                raise StoreError(f"{self} was closed")
            if time.monotonic() >= deadline:
                raise self._lock_timeout()
        try:
            pause = 50e-6
            while True:
                if self._closed and not closing:
                    raise StoreError(f"{self} was closed")
                if _try_lock(self._lock_fd, fcntl.LOCK_EX):
                    break
                # The lock is polled: a blocking flock() has no timeout and would not notice close().
                if time.monotonic() >= deadline:
                    raise self._lock_timeout()
                time.sleep(pause)
                pause = min(pause * 1.5, 5e-3)
            try:
                yield
            finally:
                with contextlib.suppress(OSError, ValueError):  # close() has closed the descriptor
                    fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _lock_timeout(self) -> NcclTimeout:
        return NcclTimeout(
            f"{self}: another process holds the lock {os.path.join(self.path, MARK)!r} for too long; it may be stopped"
        )

    def _removed_error(self, meanwhile: str) -> StoreError:
        if self._closed:
            return StoreError(f"{self} was closed while {meanwhile}")
        return StoreError(f"{self}: the folder was removed")

    def _file(self, key: str) -> str:
        return os.path.join(self._keys_folder, hashlib.sha256(_utf8(key)).hexdigest())

    def _read(self, key: str) -> bytes | None:
        path = self._file(key)
        try:
            with self._opened(path) as file:
                name, value = self._read_key(file, path), file.read(MAX_VALUE + 1)
        except FileNotFoundError:
            if self._closed:
                raise StoreError(f"{self} was closed while {key!r} was asked for") from None
            return None
        if name != _utf8(key) or len(value) > MAX_VALUE:
            raise self._damaged_error(path)
        return value

    def _opened(self, path: str) -> BinaryIO:
        try:
            return open(open_own(path, os.O_RDONLY), "rb")
        except ForeignFile as error:
            raise StoreError(f"{self}: {error}, and is not of this store") from None

    def _read_key(self, file: BinaryIO, path: str) -> bytes:
        """Read the key, which precedes the value in a file."""
        length = file.read(4)
        key = file.read(min(struct.unpack("<I", length)[0], MAX_KEY)) if len(length) == 4 else None
        if key is None or len(key) < struct.unpack("<I", length)[0]:
            raise self._damaged_error(path)
        return key

    def _damaged_error(self, path: str) -> StoreError:
        return StoreError(
            f"{self}: {path} is damaged: another program has written to it, or the file system lost a part"
        )

    def _write(self, key: str, value: bytes) -> None:
        name = _utf8(key)
        unfinished = os.path.join(self.path, f"{UNFINISHED}{self._unfinished_id}-{next(self._numbers)}")
        try:
            with open(open_own(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(struct.pack("<I", len(name)) + name)
                file.write(value)
            os.rename(unfinished, self._file(key))
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            if self._closed:
                raise StoreError(f"{self} was closed while {key!r} was set") from None
            if isinstance(error, OSError):
                raise StoreError(f"{self}: {key!r} cannot be written: {error.strerror or error}") from error
            raise

    def _remove(self, key: str) -> bool:
        try:
            os.unlink(self._file(key))
        except FileNotFoundError:
            return False
        return True

    # Keys.

    def _set(self, key: str, value: bytes, deadline: float) -> None:
        with self._locked(deadline):
            self._write(key, value)

    def _get(self, key: str, deadline: float) -> bytes | None:
        while True:
            value = self._read(key)
            if value is not None or self._wait([key], deadline):
                return value

    def _add(self, key: str, number: int, deadline: float) -> int:
        with self._locked(deadline):
            total = summed(self, key, self._read(key), number)
            self._write(key, b"%d" % total)
            return total

    def _compare_set(
        self, key: str, expected: bytes | None, desired: bytes | None, deadline: float
    ) -> tuple[bool, bytes | None]:
        with self._locked(deadline):
            swapped, value = changed(self._read(key), expected, desired)
            if swapped and value is not None:
                self._write(key, value)
            elif swapped:
                self._remove(key)
            return swapped, value

    def _append(self, key: str, value: bytes, deadline: float) -> None:
        with self._locked(deadline):
            whole = (self._read(key) or b"") + value
            if len(whole) > MAX_VALUE:
                raise StoreError(f"{self}: append to {key!r}: the value would have more than {MAX_VALUE} bytes")
            self._write(key, whole)

    def _wait(self, keys: list[str], deadline: float) -> list[str]:
        missing = self._missing(keys)
        if not missing:
            return []
        watcher = FolderWatch(self._keys_folder, self._local)
        try:
            while True:
                missing = self._missing(keys)
                if not missing or time.monotonic() >= deadline:
                    return missing
                watcher.wait(deadline, SLICE)
                os.stat(self._keys_folder)
        except FileNotFoundError:
            raise self._removed_error(f"{keys[0]!r} was waited for") from None
        finally:
            watcher.close()

    def _missing(self, keys: list[str]) -> list[str]:
        if self._closed:
            raise StoreError(f"{self} was closed while {keys[0] if keys else ''!r} was waited for")
        return [key for key in dict.fromkeys(keys) if not os.path.exists(self._file(key))]

    def _check(self, keys: list[str], deadline: float) -> bool:
        return not self._missing(keys)

    def _delete(self, key: str, deadline: float) -> bool:
        with self._locked(deadline):
            return self._remove(key)

    def _keys(self, prefix: str, deadline: float) -> list[str]:
        wanted, found = _utf8(prefix), []
        try:
            entries = os.scandir(self._keys_folder)
        except FileNotFoundError:
            raise self._removed_error("keys were listed") from None
        with entries:
            for entry in entries:
                try:
                    with self._opened(entry.path) as file:
                        key = self._read_key(file, entry.path)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                if key.startswith(wanted):
                    found.append(key.decode("utf-8", "surrogatepass"))
        return found


def _utf8(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _try_lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forked() -> None:
    """Close the parent's descriptors in a forked child: a copy would keep the parent's store alive after its death."""
    for store in list(_open_stores):
        store._close_descriptors()


os.register_at_fork(after_in_child=_forked)
