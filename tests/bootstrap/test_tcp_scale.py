"""One thread serves as many clients as there are descriptors."""

import pytest

import testing

#: A server in a separate process, since many systems do not allow one process both ends of 4,096 connections.
MEET = """
    import resource, subprocess, sys, time
    CLIENTS = {clients}
    limit = max(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2 * CLIENTS + 100)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    except ValueError:  # only root may have more than the hard limit
        raise SystemExit(f"needs a hard limit of descriptors (ulimit -Hn) of {{limit}}")
    from ncclpy.bootstrap import TCPStore, tcp

    serve = '''if True:
        import os, sys
        from ncclpy.bootstrap import TCPStore
        store = TCPStore("127.0.0.1", 0, serve=True, linger=0)
        print(store.port, flush=True)
        sys.stdin.readline()
        print(store._server.clients, sum(n == "ncclpy-store\\\\n" for n in
              [open(f"/proc/self/task/{{t}}/comm").read() for t in os.listdir("/proc/self/task")]), flush=True)
        sys.stdin.readline()
    '''
    server = subprocess.Popen([sys.executable, "-c", serve], stdin=-1, stdout=-1, text=True)
    port = int(server.stdout.readline())
    stores = [TCPStore("127.0.0.1", port) for _ in range(CLIENTS)]
    server.stdin.write("\\n")
    server.stdin.flush()
    assert server.stdout.readline().split() == [str(CLIENTS + 1), "1"]
    for turn in range(3):
        # All ask at once, and then each gets its answer; a thread for each would show the GIL.
        numbers = [
            store._client.submit(tcp.GATHER, (b"all", rank, CLIENTS, -1, b"%d" % rank if turn else b""))
            for rank, store in enumerate(stores)
        ]
        for store, number in zip(stores, numbers):
            status, found = store._client.wait(number, time.monotonic() + 60)
            assert status == 0 and found[1:] == [b"%d" % rank for rank in range(CLIENTS) if turn]
    stores[0].set("news", b"1")
    assert all(store.get("news") == b"1" for store in stores)
    for store in stores:
        store.close()
    server.communicate("\\n")
    print("met")
"""


def test_clients_meet():
    assert testing.run_python(MEET.format(clients=200), warm=True).stdout == "met\n"


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_4096_clients_meet():
    assert testing.run_python(MEET.format(clients=4096), timeout=250, warm=True).stdout == "met\n"


def test_server_without_descriptors_logs_it_and_continues():
    done = testing.run_python(
        """
        import logging, resource, subprocess, sys, threading
        said = threading.Event()
        class Handler(logging.StreamHandler):
            def emit(self, record):
                super().emit(record)
                said.set()
        logging.basicConfig(format="%(message)s", handlers=[Handler()])
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        from ncclpy.bootstrap import TCPStore
        served = TCPStore("127.0.0.1", 0, serve=True)
        clients = f'''if True:
            import resource, sys
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
            from ncclpy.bootstrap import TCPStore
            stores = [TCPStore("127.0.0.1", {served.port}) for _ in range(20)]
            from concurrent.futures import ThreadPoolExecutor
            with ThreadPoolExecutor(1) as pool:
                more = [pool.submit(TCPStore, "127.0.0.1", {served.port}) for _ in range(20)]
                stores.append(more[0].result())
                sys.stdin.readline()  # the server has said so
                for store in stores:
                    store.close()
                for each in more[1:]:
                    each.result(60).add("n", 1)
        '''
        with subprocess.Popen([sys.executable, "-c", clients], stdin=subprocess.PIPE, text=True) as started:
            assert said.wait(50)
            started.communicate("go on\\n", timeout=50)
        assert started.returncode == 0
        print(served.get("n"))
        """,
        warm=True,
    )
    assert done.stdout == "b'19'\n"
    assert "cannot accept another client" in done.stderr and "ulimit -n" in done.stderr
