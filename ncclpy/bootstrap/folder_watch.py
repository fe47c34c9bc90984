"""Waiting for changes of a folder: by inotify where it works, by polling elsewhere."""

from __future__ import annotations

import os
import select
import time

__all__ = ["FolderWatch", "is_local"]

IN_CLOEXEC, IN_NONBLOCK = 0o2000000, 0o4000
IN_MOVED_TO = 0x80

#: File systems of this machine alone: each change is made through this kernel, so inotify reports it.
LOCAL = frozenset("bcachefs btrfs ext2 ext3 ext4 f2fs jfs overlay ramfs reiserfs tmpfs xfs zfs".split())
#: Seconds between two polls. The first is for a folder that inotify does not watch or that other machines may change;
#: the second for a local folder that inotify watches, as a safeguard.
_POLL_INTERVAL, _SAFEGUARD_INTERVAL = 0.02, 1.0


def is_local(path: str) -> bool:
    """Return whether a folder is on a file system that no other machine can change; False if that is unknown."""
    path = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                mount = before.split()[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
                if len(mount) >= len(best) and os.path.commonpath([mount, path]) == mount:
                    best, kind = mount, after.split()[0]
    except (OSError, ValueError, IndexError):
        return False
    return kind in LOCAL


class FolderWatch:
    """Wait for files that are moved into a folder.

    A file that was moved before the watch was made does not end a wait: a caller makes the watch, looks at the folder,
    and then waits.
    """

    def __init__(self, folder: str, local: bool) -> None:
        self._folder = folder
        self._local = local
        self._fd = _watch(folder)
        self._pause = _SAFEGUARD_INTERVAL if local and self._fd >= 0 else _POLL_INTERVAL

    def wait(self, deadline: float, at_most: float) -> None:
        """Wait until the folder may have changed, but no longer than a poll interval, `at_most` s or the deadline."""
        pause = max(0.0, min(self._pause, at_most, deadline - time.monotonic()))
        if self._fd < 0:
            time.sleep(pause)
        else:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if poll.poll(pause * 1e3):
                try:
                    os.read(self._fd, 1 << 16)
                except BlockingIOError:
                    pass
        if not self._local:
            # A network file system may cache for a while that a file is absent; opening the folder makes the client
            # ask the server again.
            os.close(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _watch(folder: str) -> int:
    """Return an inotify descriptor; -1 if none can be had, for example since a user may have only 128 by default."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd: int = libc.inotify_init1(IN_CLOEXEC | IN_NONBLOCK)
    except AttributeError:
        return -1
    if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(folder), ctypes.c_uint32(IN_MOVED_TO)) < 0:
        os.close(fd)
        return -1
    return fd
