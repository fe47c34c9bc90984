"""The targets of the backend of torch.distributed."""

from __future__ import annotations

from benchmarks.pages.target import Target

_SAME = (
    "both launch the same kernel and end in torch.cuda.synchronize(), which takes 6 us with nothing to wait for; of "
    "the call's 20 us the process group below takes 11 and torch's own layer 5"
)
_DIGITS = "samples have five digits, of which the last is a tenth of a MiB"
_BUCKETS = (
    "nearly half of it is torch's own, copies to DDP's buckets and back, as the row of buckets that are not sent "
    "shows; and communication competes with computation for the cores, as four ranks had two"
)


def promised() -> list[Target]:
    """Targets of the backend of torch.distributed."""
    found = []

    def promise(
        engine: str, rival: str, operation: str, measure: str, limit: float, words: str, why: str = ""
    ) -> None:
        ours, theirs = ('torch.distributed, "ncclpy"', operation, measure), (rival, operation, measure)
        text = f"{words} through torch.distributed: at most {limit:g} times that of {rival.split()[-1]}"
        found.append(Target(text, "torch", engine, ours, "ratio", limit, "x", over=theirs, why=why))

    gloo, nccl = 'torch.distributed, "gloo"', 'torch.distributed, "nccl"'
    promise("host", gloo, "all_reduce of 8 B", "latency", 0.15, "an all-reduce of 8 bytes")
    promise("host", gloo, "all_reduce of 64 MiB", "latency", 0.5, "an all-reduce of 64 MiB")
    promise("gpu", nccl, "all_reduce of 8 B", "host", 0.75, "the host time of an all-reduce of 8 bytes")
    promise("gpu", nccl, "all_reduce of 8 B", "latency", 0.8, "the latency of an all-reduce of 8 bytes", _SAME)
    for way in ("DDP", "FSDP2"):
        promise("gpu", nccl, way, "time", 1.01, f"a step of a transformer under {way}")
        promise("gpu", nccl, way, "memory", 1.0, f"the peak of memory under {way}", _DIGITS)
    promise("host", gloo, "DDP, communication", "time", 0.6, "the time of communication in a step under DDP", _BUCKETS)
    return found
