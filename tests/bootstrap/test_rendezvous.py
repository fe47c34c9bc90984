"""`rendezvous` in one process: deadlines in its threads and its forks."""

import testing

# A launcher's rank with an address that no store serves yet.
ALONE = """
    import os, socket, threading, time
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    os.environ |= {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "abc",
        "NCCLPY_RUN_ID": "abc", "NCCLPY_STORE": f"127.0.0.1:{port}", "NCCLPY_STORE_TOKEN": "t",
    }
    import encodings.idna  # that a thread imports it while this one forks is beyond what a child can mend
    import ncclpy
    from ncclpy.bootstrap import TCPStore, rendezvous

    def patient():
        try:
            rendezvous(timeout=60)
        except ncclpy.NcclError:
            pass

    threading.Thread(target=patient, daemon=True).start()
    from ncclpy.bootstrap import launched
    while not launched._lock.locked():
        time.sleep(0.01)
"""


def test_each_thread_has_its_own_deadline():
    testing.run_python(ALONE + """
    started = time.monotonic()
    try:
        rendezvous(timeout=0.5)
    except ncclpy.NcclTimeout as error:
        assert "rank 1 of 2" in str(error) and "within 500 ms" in str(error), error
    else:
        raise AssertionError("nobody serves there")
    assert time.monotonic() - started < 30
    os._exit(0)
    """, warm=True)  # fmt: skip


def test_fork_does_not_wait_for_thread_of_its_parent():
    testing.run_python(ALONE + """
    child = os.fork()
    if child == 0:
        try:
            rendezvous(timeout=0.4)
        except ncclpy.NcclTimeout as error:
            os._exit(0 if "no store answers" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    os._exit(0)
    """, warm=True)  # fmt: skip
