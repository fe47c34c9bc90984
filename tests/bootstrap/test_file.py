"""FileStore: its folder, leftovers of killed processes, and how waiters are woken."""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ncclpy
import testing
from ncclpy.bootstrap import FileStore, StoreError, file, folder_watch

LONG = 20.0  # seconds that only a hang takes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "store"


def program(code, path):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code).replace("PATH", repr(str(path)))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
    )  # fmt: skip


OPEN = """
    import sys
    from ncclpy.bootstrap import FileStore
    store = FileStore(PATH)
    store.set("left", b"1")
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_last_user_removes_the_store(path):
    first, second = FileStore(path), FileStore(str(path))
    first.set("a", b"1")
    first.close()
    assert second.get("a") == b"1"
    second.close()
    assert not path.exists()


def test_leftovers_of_killed_process_do_not_reach_next_run(path, caplog):
    with program(OPEN, path) as process:
        process.stdout.readline()
        with FileStore(path, timeout=LONG) as store:
            assert store.get("left") == b"1", "its process lives"
        process.kill()
        process.wait()
    assert path.exists()
    with FileStore(path, timeout=LONG) as store:
        assert store.keys() == []
    assert "removing 1 keys that an earlier run left behind" in caplog.text


def test_killed_process_releases_its_lock(path):
    hold = "    with store._locked(float('inf')): print('locked', flush=True), sys.stdin.readline()\n"
    with FileStore(path, timeout=LONG) as store:
        with program(OPEN + hold, path) as it:
            assert it.stdout.readline() == "ready\n"
            it.stdin.write("\n")
            it.stdin.flush()
            assert it.stdout.readline() == "locked\n"
            store.timeout = 0.3
            with pytest.raises(ncclpy.NcclTimeout, match=r"another process holds the lock .*ncclpy-store"):
                store.set("a", b"")
            assert store.get("left") == b"1", "who reads needs no lock"
            it.send_signal(signal.SIGKILL)
            it.wait()
            store.timeout = LONG
            store.set("a", b"1")


def test_fork_does_not_keep_store_of_its_parent(path):
    testing.run_python(
        f"""
        import os, sys, time, warnings
        warnings.simplefilter("ignore")
        from ncclpy.bootstrap import FileStore
        store = FileStore({str(path)!r})
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        store.set("a", b"1")
        store.close()
        assert not os.path.exists({str(path)!r}), "the child holds it"
        os.write(write, b"x")
        os.waitpid(child, 0)
        """,
        warm=True,
    )


def test_invalid_place_for_store_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("somebody's")
    with pytest.raises(StoreError, match="is a file, and a store is a folder"):
        FileStore(file)
    with pytest.raises(StoreError, match="is a file, and a store is a folder"):
        FileStore(file / "below")
    with pytest.raises(StoreError, match=r"holds something else than a store \('file'\)"):
        FileStore(tmp_path)
    assert file.read_text() == "somebody's"


def test_many_threads_open_and_close_at_once(path):
    """A thread that opens while the last user closes gets the old store or a new one, never part of one."""

    def body(i):
        for turn in range(15):
            with FileStore(path, timeout=LONG) as store:
                assert store.add(f"{i} {turn}", 1) == 1
                assert store.compare_set(f"{i} {turn}", b"1", b"2")[0]
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(body, range(8)))
    assert not path.exists()


def test_filestore_late_opener_keeps_other_threads_lock(path, monkeypatch):
    """The opener closes the descriptor of a removed mark file; another thread reuses the number at once."""
    os.makedirs(path.parent)
    theirs = path.parent / "theirs"
    reused = []
    same_file, close = file._same_file, os.close

    def stale_once(fd, mark):
        monkeypatch.setattr(file, "_same_file", same_file)
        monkeypatch.setattr(os, "close", close_and_reuse)
        return False

    def close_and_reuse(fd):
        monkeypatch.setattr(os, "close", close)
        close(fd)
        reused.append((fd, os.open(theirs, os.O_RDWR | os.O_CREAT)))
        fcntl.flock(reused[0][1], fcntl.LOCK_EX)

    monkeypatch.setattr(file, "_same_file", stale_once)
    with FileStore(path):
        ((old, new),) = reused
        assert old == new
        looks = os.open(theirs, os.O_RDWR)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(looks, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(looks)
            os.close(new)


def test_folder_holds_only_keys(path):
    with FileStore(path) as store:
        for _ in range(20):
            store.add("n", 1)
            store.append("s", b"x")
        assert sorted(os.listdir(path)) == ["alive", "keys", "ncclpy-store"]
        assert len(os.listdir(path / "keys")) == 2


@pytest.mark.parametrize("told", [True, False, None], ids=["inotify", "no inotify", "network"])
def test_waiter_is_woken_with_and_without_inotify(path, monkeypatch, told):
    """On a network file system inotify reports only changes by this kernel, so that the folder is polled."""
    if told is False:
        monkeypatch.setattr(folder_watch, "_watch", lambda path: -1)
    elif told is None:
        monkeypatch.setattr(file, "is_local", lambda path: False)
    elif not folder_watch.is_local(str(path.parent.parent)):
        pytest.skip("needs a file system of this machine below pytest's folder")
    taken = []
    real = folder_watch.FolderWatch.wait

    def wait(self, *args):
        began = time.monotonic()
        real(self, *args)
        taken.append(time.monotonic() - began)

    monkeypatch.setattr(folder_watch.FolderWatch, "wait", wait)
    with FileStore(path) as store, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "a", LONG)
        # Waits of 0.1 s, so that signal handlers run, or polls at 50 Hz.
        testing.wait_for(lambda: len(taken) >= 3 if told else any(seconds < 0.09 for seconds in taken))
        waited = taken[:3]
        store.set("a", b"1")
        assert waiting.result(LONG) == b"1"
    if told:
        assert min(waited) >= 0.09


def test_file_systems_are_told_apart(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "22 21 0:50 / /nfs rw shared:1 - nfs4 server:/ rw\n"
        "23 21 0:51 / /a\\040b rw - tmpfs tmpfs rw\n"
        "24 22 0:52 / /nfs/local rw - xfs /dev/sdb rw\n"
    )
    real = open
    monkeypatch.setattr(
        folder_watch,
        "open",
        lambda path, **kw: real(mounts if path.startswith("/proc") else path, **kw),
        raising=False,
    )
    kinds = {path: folder_watch.is_local(path) for path in ("/x", "/nfs", "/nfs/x", "/nfsx", "/a b/c", "/nfs/local/x")}
    assert kinds == {"/x": True, "/nfs": False, "/nfs/x": False, "/nfsx": True, "/a b/c": True, "/nfs/local/x": True}


def test_write_torn_by_kill_does_not_spoil_the_folder(path):
    with program(OPEN, path) as process:
        process.stdout.readline()
        torn = path / "new-host-1-2-3"  # as a killed process would leave it
        torn.write_bytes(b"half of it")
        process.kill()
        process.wait()
    with FileStore(path, timeout=LONG) as store:
        assert not torn.exists(), "the next run begins without"
        torn.write_bytes(b"of another one that was killed while this one lived")
        store.set("a", b"1")
    assert not path.exists(), "and whoever is last takes all of it away"


def test_waiter_for_lock_of_closed_store_gets_error(path):
    store = FileStore(path, timeout=LONG)
    with open(path / "ncclpy-store", "rb+") as holder, ThreadPoolExecutor(4) as pool:
        fcntl.flock(holder, fcntl.LOCK_EX)  # stands for a stopped process with the lock
        waiting = [pool.submit(store.set, "a", b"1") for _ in range(4)]
        time.sleep(0.2)
        closing = threading.Thread(target=store.close)  # waits for the lock for a while
        closing.start()
        for each in waiting:
            with pytest.raises(StoreError, match="was closed"):
                each.result(LONG)
        fcntl.flock(holder, fcntl.LOCK_UN)
        closing.join()


def test_removed_folder_is_an_error_at_once(path):
    with FileStore(path, timeout=LONG) as store, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "a")
        time.sleep(0.2)
        shutil.rmtree(path)
        with pytest.raises(StoreError, match="the folder was removed"):
            waiting.result(LONG)
        with pytest.raises(StoreError, match="the folder was removed"):
            store.keys()
        with pytest.raises(StoreError, match="cannot be written"):
            store.set("a", b"")


# Other users, and their files.


def modes(path):
    return {each.name: stat.S_IMODE(each.lstat().st_mode) for each in [path, *path.rglob("*")]}


def test_files_of_store_are_for_its_user_alone(path, monkeypatch):
    mask = os.umask(0)
    try:
        with FileStore(path) as store:
            store.set("a", b"1")
            found = modes(path)
    finally:
        os.umask(mask)
    assert found.pop("store") == found.pop("keys") == 0o700
    assert set(found.values()) == {0o600} and len(found) == 3


@pytest.mark.parametrize("what", ["another user's", "open to others", "a link"])
def test_folder_shared_with_other_users_is_refused(tmp_path, monkeypatch, what):
    """For instance a container that runs as root with the folder of a user of the machine."""
    path = tmp_path / "store"
    path.mkdir(0o700)
    me = os.geteuid()
    if what == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        words = f"{path} belongs to user {me}, and this process runs as user {me + 1}"
    elif what == "open to others":
        path.chmod(0o777)
        words = f"{path} is open to other users, as its mode is 777"
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        words = f"{path} is a link"
    with pytest.raises(StoreError) as caught:
        FileStore(path, timeout=LONG)
    assert words in str(caught.value) and "mkdir -m 700" in str(caught.value)
    assert os.listdir(path) == []


@pytest.mark.parametrize("name", ["ncclpy-store", "alive", "keys"])
def test_symlink_in_place_of_store_file_is_not_followed(tmp_path, name):
    path, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    FileStore(path).close()
    path.mkdir(0o700)
    (path / "ncclpy-store").touch(0o600)
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(elsewhere)
    with pytest.raises(StoreError, match=f"{name}.* is a link"):
        FileStore(path, timeout=LONG)
    assert not elsewhere.exists()


@pytest.mark.parametrize("what", ["a pipe", "a link", "a folder", "another key", "nothing", "a torn key", "too long"])
def test_file_that_is_no_store_value_is_an_error_at_once(path, tmp_path, monkeypatch, what):
    with FileStore(path, timeout=LONG) as store:
        store.set("uid", b"1")
        store.set("other", b"2")
        value = Path(store._file("uid"))
        whole = value.read_bytes()
        value.unlink()
        if what == "a pipe":
            os.mkfifo(value)
        elif what == "a link":
            value.symlink_to(tmp_path / "elsewhere")
            (tmp_path / "elsewhere").write_bytes(whole)
        elif what == "a folder":
            value.mkdir()
        elif what == "another key":
            value.write_bytes(Path(store._file("other")).read_bytes())
        elif what == "too long":
            monkeypatch.setattr(file, "MAX_VALUE", 10)
            value.write_bytes(whole + bytes(10))
        else:
            value.write_bytes(b"" if what == "nothing" else whole[:5])
        words = {"a pipe": "is not an ordinary file", "a folder": "is not an ordinary file", "a link": "is a link"}
        calls = [lambda: store.get("uid", LONG), lambda: store.add("uid", 1)]
        if what not in ("another key", "too long"):  # keys() reads only the key, which is valid
            calls.append(store.keys)
        for call in calls:
            with pytest.raises(StoreError, match=words.get(what, "is damaged")):
                testing.run_with_deadline(call)
        store.delete("uid") if what != "a folder" else value.rmdir()
        assert store.get("other") == b"2"
