"""Send a trainer's weights to two inference engines. An engine is killed and restarted, the trainer is replaced.

Each process is a rank of one group that is for the transfers alone. After a failure the remaining ranks continue
(`recover`); new processes join at the next transfer. Every engine checks that its weights are of one version.

python examples/weights_to_engines.py
"""

import subprocess
import sys
import time
from typing import Any

import torch

import ncclpy
from ncclpy.bootstrap import TCPStore
from ncclpy.interop.torch import WeightReceiver, WeightSender

ncclpy.use("host")  # on GPUs: leave it out, and keep the weights on the GPU of the rank
TRAINER, RANKS = 0, 3  # engines are 1 and 2
MEMBER: dict[str, Any] = {"name": "weights", "timeout": 60.0}


def made(store: TCPStore, number: int) -> ncclpy.ProcessGroup:
    return ncclpy.ProcessGroup(store, number, RANKS, device=number, **MEMBER)


def train(sender: WeightSender, store: TCPStore) -> None:
    """Send new weights until `main` stops the trainer; a successor continues after the last version."""
    version = int(store.get("version")) if store.check(["version"]) else 0
    stop = False
    while not stop:
        version, stop = version + 1, store.check(["stop"])
        weights = {f"layer.{i}": torch.full((50, 50), float(version)) for i in range(8)}  # a training step
        while True:
            try:
                sender.send(weights | {"stop": torch.tensor(stop)}, version)
                break
            except ncclpy.NcclError as error:
                found = sender.group.recover(timeout=20)
                print(f"version {version} is sent again, without {found.lost}: {error}")
        store.set("version", b"%d" % version)
    sender.group.close()


def serve(receiver: WeightReceiver, store: TCPStore, number: int) -> None:
    """Receive weights until a version with a true `stop` has arrived."""
    while True:
        try:
            version, weights = receiver.receive()
        except ncclpy.NcclError:
            receiver.group.recover(timeout=20)
            continue
        layers = [each for name, each in weights.items() if name != "stop"]
        assert all((each == version).all() for each in layers), "a mixture of versions"
        store.set(f"engine/{number}", b"%d" % version)
        if weights["stop"]:
            break
    receiver.group.close()


def member(port: int, number: int, joins: bool) -> None:
    store = TCPStore("127.0.0.1", port)  # when its connection ends, the others learn of it at once
    if number == TRAINER:
        train(WeightSender.join(store, device=number, **MEMBER) if joins else WeightSender(made(store, number)), store)
    elif joins:
        serve(WeightReceiver.join(store, device=number, **MEMBER), store, number)
    else:
        serve(WeightReceiver(made(store, number)), store, number)


def main() -> None:
    """Serve the store, which outlives every rank; kill and replace an engine, then the trainer."""
    with TCPStore("127.0.0.1", 0, serve=True) as store:

        def start(number: int, *joins: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, __file__, str(store.port), str(number), *joins])

        def version_of(engine: int) -> int:
            return int(store.get(f"engine/{engine}", 60))

        def wait_for_versions(engine: int, more: int) -> None:
            last = version_of(engine)
            while version_of(engine) < last + more:
                time.sleep(0.01)

        processes = {number: start(number) for number in range(RANKS)}
        wait_for_versions(2, 3)
        processes[2].kill()
        processes[2].wait()
        wait_for_versions(1, 3)  # the others continue
        killed = version_of(2)
        processes[2] = start(2, "joins")
        while version_of(2) == killed:
            time.sleep(0.01)
        processes[TRAINER].kill()
        processes[TRAINER].wait()
        processes[TRAINER] = start(TRAINER, "joins")
        wait_for_versions(1, 3)
        store.set("stop", b"")
        codes = [process.wait() for process in processes.values()]
        versions = version_of(1), version_of(2)
    assert codes == [0, 0, 0], codes
    assert versions[0] == versions[1], versions
    print("both engines have the trainer's last version")


if len(sys.argv) > 2:
    member(int(sys.argv[1]), int(sys.argv[2]), "joins" in sys.argv)
elif __name__ == "__main__":
    main()
