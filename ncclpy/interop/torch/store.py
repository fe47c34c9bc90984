"""A ``torch.distributed.Store`` as a `Store`."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ncclpy.bootstrap.local import summed
from ncclpy.bootstrap.store import StatusPublication, Store, StoreError, StoreLost
from ncclpy.bootstrap.store_arguments import names
from ncclpy.interop.torch.build import EXTENSION
from ncclpy.interop.torch.shutdown import StoreShutdown, connection_to

T = TypeVar("T")

# Limits of torch's server in bytes: for a larger key or value it closes the connection, without an error.
_MAX_KEY = 8 << 10
_MAX_VALUE = 8 << 20
# Keys for locks, which users do not see.
_LOCKS = "\0ncclpy/lock/"
# Prefix of keys that are kept in hexadecimal: torch cannot take a lone surrogate, which has no UTF-8.
_ESCAPED = "\0ncclpy/hex/"
# Prefix of keys that list the keys of a folder, one a line, for releases of torch that cannot list keys (before 2.10).
_LISTINGS = "\0ncclpy/made/"
#: Seconds that the process's exit waits for calls to return.
_EXIT_PATIENCE = 5.0
#: Seconds that a wait sleeps between two reads: at first, and at most.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
# What FileStore.list_keys returns for the store's internal keys: it cuts off their first letter.
_NOT_KEYS = ("efcount/", "leanup/")


class _CallsAtExit:
    """The calls of torch's stores that are in progress; the process's exit waits for them.

    Torch releases the GIL in a call. Once the interpreter has ended, Python unwinds the stack of a daemon thread that
    takes the GIL again. C++ does not allow that, and the process would be aborted. So exit waits for such threads, and
    they make no further calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ncalls = 0
        self._is_exiting = False
        #: Heartbeats, which call from threads of their own.
        self.beats: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self) -> None:
        """Begin a call; during exit, end the calling thread instead if it is a daemon thread."""
        with self._lock:
            if self._is_exiting and threading.current_thread().daemon:
                raise SystemExit
            self._ncalls += 1

    def end(self) -> None:
        """End a call."""
        with self._lock:
            self._ncalls -= 1

    def wait(self) -> None:
        """Wait for the calls of other threads; they are short, as none of them waits for a key."""
        self._is_exiting = True
        for beat in list(self.beats):
            beat.close()
        deadline = time.monotonic() + _EXIT_PATIENCE
        while self._ncalls and time.monotonic() < deadline:
            time.sleep(0.001)


_calls = _CallsAtExit()
atexit.register(_calls.wait)


def _forked() -> None:
    """Reset the count of calls in a forked child, which has none of the other threads."""
    global _calls
    _calls = _CallsAtExit()
    atexit.register(_calls.wait)


os.register_at_fork(after_in_child=_forked)


def adapt(obj: object) -> Store | None:
    """Return a `Store` over a store of torch; None if `obj` is not one."""
    from torch.distributed import Store as TorchsStore

    return TorchStore(obj) if isinstance(obj, TorchsStore) else None


def connect(address: str | None, port: int | None, timeout: float) -> Store:
    """Return a client of the store that torchrun's agent serves."""
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise StoreError(
            "torchrun serves its store in torch's own protocol (TORCHELASTIC_USE_AGENT_STORE=True), and torch cannot "
            f"be imported here: {error}"
        ) from error
    seconds = datetime.timedelta(seconds=min(timeout, 1e6))
    try:
        torch_store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=seconds)
    except RuntimeError as error:
        raise StoreLost(f"torchrun's store at {address}:{port} cannot be reached: {error}") from error
    return TorchStore(torch_store, timeout)


def _without_frames(error: BaseException) -> str:
    """Return the text of an error of torch, without the C++ frames that follow it."""
    return str(error).split("\nException raised from ", 1)[0].split("\nframe #", 1)[0].strip()


class TorchStore(Store):
    """Keep keys in a store of torch, through a separate client if the store can be cloned.

    Torch's stores have no call that waits without holding up the client's other threads, so waits poll. Keys and
    values are stored unchanged, so that other programs can read them. Torch's own calls are not enough for
    `compare_set`: for that a lock is kept in the store, which only a `TorchStore` respects.

    Parameters
    ----------
    torch_store
        The store of torch.
    timeout
        Seconds that an operation may take by default; None means the store's own timeout.
    shutdown
        The shutdown of the store's world; after its end, calls of this store raise `StoreEnded`.
    """

    def __init__(self, torch_store: Any, timeout: float | None = None, shutdown: StoreShutdown | None = None) -> None:
        super().__init__(torch_store.timeout.total_seconds() if timeout is None else timeout)
        self._shown = f"{type(torch_store).__module__}.{type(torch_store).__qualname__}"
        self._connection, self._shutdown = connection_to(torch_store), shutdown
        self._absent = secrets.token_bytes(16)
        self._has_own_client = True  # a clone: the program's calls do not hold up calls of this store
        try:
            self._torch_store = torch_store.clone()
        except (RuntimeError, NotImplementedError, AttributeError):
            self._torch_store = torch_store  # it cannot be cloned, like all stores before torch 2.8
            self._has_own_client = False
        self._can_list = hasattr(self._torch_store, "list_keys")

    def __repr__(self) -> str:
        return f"as_store({self._shown})"

    def _ask(self, call: Callable[..., T], *args: Any) -> T:
        """Call the store; its errors become errors of `Store`."""
        if self._closed:
            raise StoreError(f"{self} was closed while it was in use")
        if self._shutdown is None:
            return self._call(call, *args)
        self._shutdown.begin_call()
        try:
            return self._call(call, *args)
        finally:
            self._shutdown.end_call()

    def _call(self, call: Callable[..., T], *args: Any) -> T:
        if self._connection is not None and self._connection.has_ended():  # torch would print a C++ backtrace
            server = "its server" if self._shutdown is None else self._shutdown.server
            raise StoreLost(f"{self}: {server} has ended (at {self._connection.host}:{self._connection.port})")
        _calls.begin()
        try:
            with self._errors():
                return call(*args)
        finally:
            _calls.end()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of torch's store into errors of `Store`."""
        from torch.distributed import DistNetworkError

        try:
            yield
        except DistNetworkError as error:
            raise StoreLost(f"{self}: {_without_frames(error)}") from None
        except (RuntimeError, ValueError) as error:
            raise StoreError(f"{self}: {_without_frames(error)}") from None

    def _name(self, key: str) -> str:
        try:
            size = len(key.encode())
        except UnicodeEncodeError:
            key = _ESCAPED + key.encode("utf-8", "surrogatepass").hex()
            size = len(key)
        if size > _MAX_KEY:
            raise StoreError(
                f"{self}: key {names([key])} has {size} bytes, and stores of torch take {_MAX_KEY >> 10} KiB"
            )
        return key

    def _value(self, key: str, value: bytes) -> bytes:
        if len(value) > _MAX_VALUE:
            raise StoreError(
                f"{self}: the value of {names([key])} has {len(value)} bytes, and stores of torch take "
                f"{_MAX_VALUE >> 20} MiB"
            )
        return value

    def _read(self, name: str) -> bytes | None:
        """Return a value, or None if there is none now.

        Torch's `get` waits, and returns an empty value for a key that is deleted meanwhile. Its `compare_set` returns
        the value in one step or, if there is none, the expected value.
        """
        found = bytes(self._ask(self._torch_store.compare_set, name, self._absent, self._absent))
        return None if found == self._absent else found

    def _finish(self, name: str) -> None:
        """Wait until the server has executed the calls that this connection has sent.

        TCPStore's `set` and `append` return when the call is sent: another client may read before the server executes
        it.
        """
        self._ask(self._torch_store.check, [name])

    def _until(self, look: Callable[[], T | None], deadline: float) -> T | None:
        """Return what `look` returns once that is not None, or None at the deadline."""
        pause = _SHORTEST_PAUSE
        while True:
            found = look()
            rest = deadline - time.monotonic()
            if found is not None or rest <= 0:
                return found
            time.sleep(min(pause, rest))
            pause = min(2 * pause, _LONGEST_PAUSE)

    @contextlib.contextmanager
    def _key_lock(self, name: str, deadline: float) -> Iterator[None]:
        """Hold the lock of a key among all clients of this kind.

        The lock is released even if this store is closed, its world ends, the process ends or a signal handler raises
        meanwhile: otherwise other processes would wait for it until their deadlines.
        """
        lock, own_id = self._name(_LOCKS + name), f"{os.getpid()}/{secrets.token_hex(8)}".encode()

        def take() -> contextlib.ExitStack | None:
            with contextlib.ExitStack() as held:
                held.enter_context(self._exit_waits())
                found = self._ask(self._torch_store.compare_set, lock, b"", own_id)
                return held.pop_all() if bytes(found) == own_id else None

        try:
            held = self._until(take, deadline)
        except BaseException:  # also of a signal handler, just after the server has given this client the lock
            with contextlib.suppress(StoreError), self._exit_waits():
                if self._read(lock) == own_id:
                    self._release(lock)
            raise
        if held is None:
            holder = self._read(lock) or b"?"
            raise StoreError(
                f"{self}: process {holder.decode().partition('/')[0]} holds the lock of {names([name])} and has "
                "not released it in time; if the process has ended, delete the key " + repr(lock)
            )
        with held:
            try:
                yield
            finally:
                self._release(lock)

    def _release(self, lock: str) -> None:
        """Release a lock, also in a closed store."""
        if self._connection is None or not self._connection.has_ended():
            with self._errors():
                self._torch_store.delete_key(lock)

    @contextlib.contextmanager
    def _exit_waits(self) -> Iterator[None]:
        """Make the process's exit and the world's shutdown wait until the block ends."""
        _calls.begin()
        try:
            if self._shutdown is None:
                yield
                return
            self._shutdown.begin_call()
            try:
                yield
            finally:
                self._shutdown.end_call()
        finally:
            _calls.end()

    def _set(self, key: str, value: bytes, deadline: float) -> None:
        name = self._name(key)
        self._record_key(name, deadline)
        if value:
            self._ask(self._torch_store.set, name, self._value(key, value))
            self._finish(name)
        else:
            with self._key_lock(name, deadline):  # for torch's compare_set, an empty value and no key are the same
                self._ask(self._torch_store.set, name, value)

    def _get(self, key: str, deadline: float) -> bytes | None:
        name = self._name(key)
        return self._until(lambda: self._read(name), deadline)

    def _add(self, key: str, number: int, deadline: float) -> int:
        name = self._name(key)
        # Raises for a value that torch's server cannot read as a number, and for a sum that would overflow there.
        summed(self, key, self._read(name), number)
        self._record_key(name, deadline)
        return int(self._ask(self._torch_store.add, name, number))

    def _compare_set(
        self, key: str, expected: bytes | None, desired: bytes | None, deadline: float
    ) -> tuple[bool, bytes | None]:
        name = self._name(key)
        if expected is None and desired is None:  # only reads
            found = self._read(name)
            return found is None, found
        if desired is not None:
            self._record_key(name, deadline)
        with self._key_lock(name, deadline):
            while True:
                found = self._read(name)
                if found != expected:
                    return False, found
                if desired is None:
                    if found is not None:
                        self._ask(self._torch_store.delete_key, name)
                    return True, None
                stored = bytes(self._ask(self._torch_store.compare_set, name, found or b"", self._value(key, desired)))
                # Also equal if another program, which takes no lock, has just set the same value: that counts as a
                # write after this one.
                if stored == desired:
                    return True, desired

    def _append(self, key: str, value: bytes, deadline: float) -> None:
        name = self._name(key)
        if value and self._torch_store.has_extended_api():
            self._record_key(name, deadline)
            self._ask(self._torch_store.append, name, self._value(key, value))
            self._finish(name)
            return
        while True:
            found = self._read(name)
            if self._compare_set(key, found, (found or b"") + value, deadline)[0]:
                return

    def _wait(self, keys: list[str], deadline: float) -> list[str]:
        left = list(dict.fromkeys(keys))

        def look() -> bool | None:
            while left and self._ask(self._torch_store.check, [self._name(left[-1])]):
                left.pop()
            return None if left else True

        left.reverse()
        if self._until(look, deadline):
            return []
        return [key for key in reversed(left) if not self._ask(self._torch_store.check, [self._name(key)])]

    def _check(self, keys: list[str], deadline: float) -> bool:
        return not keys or bool(self._ask(self._torch_store.check, [self._name(key) for key in keys]))

    def _delete(self, key: str, deadline: float) -> bool:
        name = self._name(key)
        with self._key_lock(name, deadline):
            existed = self._read(name) is not None  # FileStore's delete_key does not return it
            self._ask(self._torch_store.delete_key, name)
        self._record_key(name, deadline, exists=False)
        return existed

    def _record_key(self, name: str, deadline: float, exists: bool = True) -> None:
        """Record a key in the listing of its folder, if torch cannot list keys; called before the key is set.

        With ``exists=False`` remove the key from the listing; called after the key was deleted.
        """
        if self._can_list:
            return
        listing, line = self._name(_LISTINGS + name.rpartition("/")[0]), f"{name.encode().hex()}\n".encode()
        with self._key_lock(listing, deadline):
            found = self._read(listing) or b""
            if exists and line not in found:
                self._ask(self._torch_store.set, listing, found + line)
            elif not exists and found == line:
                self._ask(self._torch_store.delete_key, listing)
            elif not exists and line in found:
                self._ask(self._torch_store.set, listing, found.replace(line, b""))

    def _recorded(self, prefix: str) -> list[str]:
        """Return the recorded keys of a folder that exist."""
        if not prefix.endswith("/"):
            raise StoreError(f"{self}: this release of torch cannot list keys, except those in a folder, 'name/'")
        lines = (self._read(self._name(_LISTINGS + prefix[:-1])) or b"").decode().split()
        names = [bytes.fromhex(line).decode() for line in dict.fromkeys(lines)]
        return [name for name in names if self._ask(self._torch_store.check, [name])]

    def _keys(self, prefix: str, deadline: float) -> list[str]:
        found = []
        for name in self._ask(self._torch_store.list_keys) if self._can_list else self._recorded(prefix):
            if name.startswith(_ESCAPED):
                name = bytes.fromhex(name[len(_ESCAPED) :]).decode("utf-8", "surrogatepass")
            if name.startswith(prefix) and not name.startswith(_LOCKS):
                if name not in _NOT_KEYS or self._ask(self._torch_store.check, [name]):
                    found.append(name)
        return found

    def _beat(self, key: str, before: bytes, period: float) -> StatusPublication | None:
        if not self._has_own_client:
            raise StoreError(f"{self}: torch cannot clone this store: a wait of the program would hold up heartbeats")
        extension = sys.modules.get(EXTENSION)  # loaded if the program uses the torch.distributed backend
        idle = None if self._connection is None else self._connection.fileno()
        if extension is None or idle is None:
            return None
        name = self._name(key)
        self._record_key(name, time.monotonic() + self.timeout)
        torch_store = self._torch_store.clone()  # so that heartbeats do not wait for this store's calls

        def begin() -> StatusPublication:
            beat: StatusPublication = extension.Heartbeat(torch_store, name, before.decode(), period, idle)
            _calls.beats.add(beat)
            if self._shutdown is not None:
                self._shutdown.beats.add(beat)
            return beat

        return self._ask(begin)

    def _close(self) -> None:
        """Leave torch's store as it is; a thread that waits in this store raises at its next call of torch's."""
