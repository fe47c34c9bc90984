"""Checks of folders and files that no other user may change: of stores, of loaded libraries, of secrets."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["ForeignFile", "make_folder", "open_own", "why_exposed", "why_foreign", "why_owner_untrusted"]

#: The most links followed on the way to a folder: the system's own limit.
_MAX_LINKS = 40


class ForeignFile(OSError):
    """Report a file that is not an ordinary file of this user."""


def why_foreign(path: str | os.PathLike[str], *, secret: bool = False) -> str:
    """Return why a folder is not for this user alone; "" if it is.

    The reason is the end of a sentence that begins with the folder's path.

    Parameters
    ----------
    path
        The folder; a link is not followed.
    secret
        Whether other users must have no access to the folder. If False, they may read it.

    Raises
    ------
    OSError
        If the folder does not exist.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return "is a link; give the path of the folder itself"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if status.st_uid != os.geteuid():
        return _owned_by_another(status)
    if status.st_mode & (0o077 if secret else 0o022):
        return f"is open to other users, as its mode is {stat.S_IMODE(status.st_mode):03o} (chmod 700 ends that)"
    return ""


def why_exposed(path: str | os.PathLike[str]) -> str:
    """Return how another user could change or replace a folder, as a sentence; "" if no other user could.

    Each folder on the way must belong to root or to this user, and other users may write to it only if it is sticky,
    as /tmp is. Links on the way are followed, and must belong to root or to this user too. The folder itself must
    belong to this user, be closed to writes of other users, and be no link.
    """
    at, left, links = "/", _parts(os.path.abspath(path)), 0
    while left:
        name = left.pop(0)
        step = os.path.normpath(os.path.join(at, name))
        status = os.lstat(step)
        if status.st_uid not in (0, os.geteuid()):
            return f"{step} {_owned_by_another(status)}"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MAX_LINKS:
                return f"{step} is one of more than {_MAX_LINKS} links"
            target = os.readlink(step)
            at, left = "/" if target.startswith("/") else at, [*_parts(target), *left]
            continue
        at = step
        if left and status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            return f"{step} is open to other users, as its mode is {stat.S_IMODE(status.st_mode):03o}"
    why = why_foreign(path)
    return f"{os.fspath(path)} {why}" if why else ""


def why_owner_untrusted(path: str | os.PathLike[str]) -> str:
    """Return the end of a sentence that begins with a folder's path and names its owner; "" if the owner is trusted.

    Trusted are this user and root; a process of root trusts every user.
    """
    status = os.stat(path)
    return "" if os.geteuid() == 0 or status.st_uid in (0, os.geteuid()) else _owned_by_another(status)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _owned_by_another(status: os.stat_result) -> str:
    me = os.geteuid()
    squashed = " (NFS with root_squash gives root's files to another user)" if me == 0 else ""
    return f"belongs to user {status.st_uid}, and this process runs as user {me}{squashed}"


def make_folder(path: str) -> None:
    """Make a folder, and missing folders above it, for this user alone; leave folders that exist as they are."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent == path:
            raise
        make_folder(parent)
        make_folder(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open an ordinary file of this user and return its descriptor; a file that is created is for this user alone.

    The call never blocks, as the opening of a pipe could. A link at the path is not followed.

    Raises
    ------
    ForeignFile
        If a link, a file of another user, or something that is not an ordinary file is at the path.
    OSError
        If `os.open` fails, for example for a folder that is to be written.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ForeignFile(f"{os.fspath(path)} is a link") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFile(f"{os.fspath(path)} is not an ordinary file")
        if status.st_uid != os.geteuid():
            raise ForeignFile(f"{os.fspath(path)} {_owned_by_another(status)}")
    except BaseException:
        os.close(fd)
        raise
    return fd
