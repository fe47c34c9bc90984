"""Memory that processes of one machine have together.

It has no name (`memfd_create`): it is opened through a descriptor of the process that has made it, and ends with the last
process that has it, however these end.
"""

import fcntl
import json
import os
import secrets
import stat


def read_offer(packed):
    """Return what a process tells of its memory: its machine, and if it has any, how others find it (`reopen`).

    Raises
    ------
    KeyError, TypeError, ValueError
        If it tells of something else.
    """
    told = json.loads(packed)
    offer = {"machine": str(told["machine"]), "pid": int(told.get("pid", 0))}
    if "fd" in told:
        offer.update(fd=int(told["fd"]), token=bytes.fromhex(told["token"]))
    return offer


def create(name, length):
    """Return a descriptor of new memory of so many bytes, and the word that it is known by, with which it begins."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length)
        # Who reads what another one has cut off is killed.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        token = secrets.token_bytes(TOKEN)
        os.pwrite(fd, token, 0)
        return fd, token
    except BaseException:
        os.close(fd)
        raise


def reopen(pid, fd, token, length):
    """Return a descriptor of one's own of the memory that a process of this machine has under one of its own.

    Raises
    ------
    OSError
        If it cannot be had, or is another one.
    """
    own = os.open(f"/proc/{int(pid)}/fd/{int(fd)}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(own)
        # In a container process and descriptor may be another's.
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size == length
        if not is_ours or os.pread(own, TOKEN, 0) != token:
            raise OSError(f"descriptor {fd} of process {pid} is not the group's")
        return own
    except BaseException:
        os.close(own)
        raise
