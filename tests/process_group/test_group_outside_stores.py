"""Death of a rank with the store in that rank, which ends all, or outside of all ranks: then the others continue."""

from __future__ import annotations

import shutil
import textwrap

import foreign_stores
import pytest
from warm_ranks import run_ranks

pytestmark = pytest.mark.usefixtures("host_engine")

PROGRAM = """
from ncclpy.bootstrap import TCPStore
rank, size = int(os.environ["RANK"]), 3
{store}
group = ncclpy.ProcessGroup(store, rank, size, device=rank, timeout=30)
group.all_reduce(np.ones(2)).wait(30)
group.state()  # each tells what it does
group.barrier().wait(30)
if rank == 0:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.all_reduce(np.ones(2)).wait(30)
except ncclpy.NcclError:
    pass
try:
    found = group.recover(10)
    said = f"rank {{rank}} goes on: {{found.survivors}} {{group.all_reduce(np.ones(2)).result(30)[0]}}"
except ncclpy.NcclError as error:
    said = f"rank {{rank}} ends: {{type(error).__name__}} {{error}}"
print(said, flush=True)  # in one piece: what other threads log comes by the same pipe
group.close()
"""


def run(tmp_path, store):
    """Run the ranks and return their output."""
    codes, said = run_ranks(tmp_path, 3, PROGRAM.format(store=textwrap.dedent(store)))
    assert codes == [-9, 0, 0], said
    return said


def test_store_in_rank_ends_with_it(tmp_path):
    said = run(
        tmp_path,
        f"""
        port = "{tmp_path}/port"
        if rank == 0:
            store = TCPStore("127.0.0.1", 0, serve=True)
            with open(port + ".new", "w") as file:
                file.write(str(store.port))
            os.rename(port + ".new", port)
        else:
            while not os.path.exists(port):
                time.sleep(0.01)
            store = TCPStore("127.0.0.1", int(open(port).read()))
        """,
    )
    for rank in (1, 2):
        assert f"rank {rank} ends: NcclError rank {rank} of process group 'default' cannot recover it" in said
        assert "Use a store that outlives each rank: that of the launcher (ncclpy run), or Redis" in said


def test_any_rank_may_die_with_redis(tmp_path):
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    with foreign_stores.redis_server(tmp_path) as path:
        said = run(tmp_path, f"import redis\nstore = redis.Redis(unix_socket_path={str(path)!r})")
    for rank in (1, 2):
        assert f"rank {rank} goes on: (1, 2) 2.0" in said, said
