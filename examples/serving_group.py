"""Serve a layer that is divided among three processes, of which two are killed: the others take over their parts.

Each rank has some of the layer's columns. Rank 0 takes the requests, sends each to all, and gathers the parts of the
answer. When a rank dies, the survivors divide the layer anew, and their rank 0 continues with the first request that
has no answer. So every request is answered, whichever rank dies at whatever moment.

python examples/serving_group.py
"""

import subprocess
import sys

import numpy as np

import ncclpy
from ncclpy.bootstrap import TCPStore

ncclpy.use("host")  # numpy arrays lie in CPU memory: this program runs on the host engine everywhere
RANKS, REQUESTS, WIDTH, COLUMNS = 3, 60, 16, 24

layer = np.random.default_rng(0).normal(size=(WIDTH, COLUMNS))


def serve(group: ncclpy.ProcessGroup) -> None:
    """Answer requests until the last one, with the columns that belong to this rank in a group of this size."""
    number = 0
    while True:
        try:
            request = np.zeros(1 + WIDTH)  # its number, and its vector
            if group.rank == 0:
                while number < REQUESTS and group.store.check([f"answer/{number}"]):
                    number += 1
                request[0] = number
                if number < REQUESTS:
                    request[1:] = np.frombuffer(group.store.get(f"request/{number}", 60))
            group.broadcast(request, root=0).wait()
            number = int(request[0])
            if number == REQUESTS:
                return
            edges = [rank * COLUMNS // group.size for rank in range(group.size + 1)]
            mine = request[1:] @ layer[:, edges[group.rank] : edges[group.rank + 1]]
            answer = [np.empty(edges[rank + 1] - edges[rank]) for rank in range(group.size)]
            group.all_gather(mine, answer).wait()
            if group.rank == 0:
                group.store.set(f"answer/{number}", np.concatenate(answer).tobytes())
        except ncclpy.NcclError as error:
            found = group.recover(timeout=30)
            print(f"{group.size} ranks continue without {found.lost}: {error}")


def main() -> None:
    with TCPStore("127.0.0.1", 0, serve=True) as store:
        processes = [subprocess.Popen([sys.executable, __file__, str(store.port), str(rank)]) for rank in range(RANKS)]
        asked = np.random.default_rng(1).normal(size=(REQUESTS, WIDTH))
        for number in range(REQUESTS):
            if number in (REQUESTS // 3, 2 * REQUESTS // 3):
                processes[1 if number == REQUESTS // 3 else 0].kill()
            store.set(f"request/{number}", asked[number].tobytes())
            answer = np.frombuffer(store.get(f"answer/{number}", 60))
            assert np.allclose(answer, asked[number] @ layer), f"request {number} is answered wrongly"
        codes = [process.wait() for process in processes]
    assert codes == [-9, -9, 0], codes
    print(REQUESTS, "requests answered")


if len(sys.argv) > 2:
    with ncclpy.ProcessGroup(
        TCPStore("127.0.0.1", int(sys.argv[1])), int(sys.argv[2]), RANKS, device=int(sys.argv[2]), timeout=60
    ) as members:
        serve(members)
elif __name__ == "__main__":
    main()
