"""The words that tables show for the names in results, and the notes of kept results in plainer words.

A row's names identify it: targets, figures and comparisons find rows by them, and the kept results have them. So
programs keep using these names, and only what readers see is reworded here.
"""

from __future__ import annotations

import re

#: The heads of the columns with a row's rival and road.
RIVAL, ROAD = "library", "call path"

#: Names of measures, operations, rivals, roads and settings, and the words that are shown instead.
_NAMES = {
    "the time that passes": "wall time",
    # bootstrap
    "to connect all": "to connect all clients",
    "barrier of all": "barrier of all clients",
    "the server's time to connect a client": "the server's CPU time to connect a client",
    "the server's time in a barrier, a client": "the server's CPU time in a barrier, per client",
    "the server's memory, a client": "the server's memory per client",
    # coordinator
    "an agreement, a core a rank": "an agreement, one core per rank",
    "names that are new": "agreement on new names",
    "names that are known": "agreement on known names",
    # manager
    "not the last one": "any participant but the last",
    "the last one": "the last participant",
    "a thread each": "one thread per device",
    "the last add, right behind another": "the last add, directly after another",
    # memory
    "comes": "add",
    "comes, with that call": "add and next call",
    "goes": "remove",
    # process_group
    "to stand": "to start",
    "a send of 8 bytes there, one back and the waits for them, 2 processes": (
        "a send of 8 bytes, one back, and the waits for both, 2 processes"
    ),
    # recovery
    "from that to the last return of recover()": "from the last survivor's error to the last return of recover()",
    "from that to the last return of recover() after a SIGSTOP": (
        "from the last survivor's error to the last return of recover(), after a SIGSTOP"
    ),
    "of that in join() and the all-reduce": "from the call of join() to the end of the all-reduce",
    "a communicator of one rank less anew, and an all-reduce": (
        "a new communicator of one rank less, and an all-reduce"
    ),
    "recover() of a group that is well": "recover() of a group without a failure",
    "the first all-reduce after it": "the first all-reduce after that recover()",
    # reports
    "state(), asked by one rank": "state(), called by one rank",
    "ranks that the error has heard of": "ranks whose own report is in the error",
    "the notice of the end": "size of the notice of the end",
    "the server's time for an operation, busy": "the server's CPU time for an operation, all ranks busy",
    # scale
    "a process a rank": "one process per rank",
}

#: Parts of notes, as regular expressions, and what is shown instead. Programs now write the plainer words.
_NOTES = {
    # bootstrap
    r"that of ours does\.": "that of ncclpy's store does.",
    r"No name service is asked": "No name service is used",
    r"which takes it 5 s or more where none answers": "which takes 5 s or more if no name service answers",
    r"The server's time is that of its processors, its memory what is resident in its process: sockets are the "
    r"kernel's and come on top of it\.": (
        "The server's time is the CPU time of its process, its memory the resident memory of its process: the "
        "kernel's memory for sockets is not included."
    ),
    # collectives
    r"nccl-tests rounds a rank's share down to 16 bytes: sizes below have no row of it\.": (
        "nccl-tests rounds a rank's share down to 16 bytes, so it has no row for smaller sizes."
    ),
    r"Calls in a row go through buffers of the largest size, each behind the last one's part, as nccl-tests' do\. "
    r"Memory is that of ncclMemAlloc, but for torch\.distributed and CuPy\.": (
        "Successive calls use successive parts of buffers of the largest size, as in nccl-tests. The memory is from "
        "ncclMemAlloc, except for torch.distributed and CuPy."
    ),
    r"nccl-tests has its ranks in threads of one process, the others have a process each\.": (
        "nccl-tests runs its ranks as threads of one process, the other libraries run one process per rank."
    ),
    r"NCCL takes them for ranks on different hosts and goes through the loopback device, where it would use NVLink\. "
    r"nccl-tests cannot, in one process\.": (
        "NCCL treats the ranks as if they were on different hosts, and uses the loopback device instead of NVLink. "
        "nccl-tests, whose ranks are in one process, cannot do so."
    ),
    r"What a graph uses NCCL registers by itself, where it can, so plain memory too \(NCCL_GRAPH_REGISTER\)\.": (
        "NCCL registers the memory that a graph uses where it can, also plain memory (NCCL_GRAPH_REGISTER)."
    ),
    r"what registration is worth to algorithms that use it \(NVLS\), and symmetric kernels with multicast, could not "
    r"be seen\.": (
        "the gain of registration for algorithms that use it (NVLS), and symmetric kernels with multicast, were not "
        "measured."
    ),
    # coordinator
    r"behind (\d+) that are not counted, from a barrier": r"after \1 that are not counted, from a barrier",
    r"What a rival reduces it reduces in one order on all ranks\.": (
        "mpi4py and torch.distributed reduce in one order on all ranks."
    ),
    r"the ranks' calls are timed one after the other, and put together as if each had a core and wires took no time; "
    r"8 ranks a machine\. A name that all know, from the first bring until the last rank hears that it runs\.": (
        "the ranks' calls are timed one after the other, and added up as if each rank had a core and the network took "
        "no time, with 8 ranks per machine. For a name that all ranks know, from the first bring until the last rank "
        "has the response."
    ),
    r"with sockets and threads, on the cores that there are; so it grows with the ranks\.": (
        "with sockets and threads, all on the cores of this machine, so the time grows with the ranks."
    ),
    r"two ranks in one process bring so many at once, from the first bring until the last rank has heard of all\.": (
        "two ranks in one process bring that many at once; from the first bring until the last rank has all responses."
    ),
    r"and with ([\d,]+) ([\d.]+) times what that says: (no )?worse than that\.": (
        r"and with \1, \2 times what this formula gives: \3worse than the formula."
    ),
    r"^an agreement, a core a rank:": "an agreement, one core per rank:",
    r"^names that are (new|known):": r"agreement on \1 names:",
    # instructions
    r"(\d+) operations a sample behind (\d+) that are not counted; an operation's part of the loop is in it\.": (
        r"A sample has \1 operations, after \2 that are not counted; it includes an operation's share of the loop."
    ),
    # manager
    r"The last add comes when the collective before it is done, or 1 ms later \(in which the lanes fall asleep, and "
    r"waking a core can take 200 us\), or at once\.": (
        "The last add is called when the collective before it is done, or 1 ms later (meanwhile the lanes fall "
        "asleep, and waking a core can take 200 us), or directly after it."
    ),
    r"the way from stream to stream is in it\.": "it includes the path from stream to stream.",
    # memory
    r"What a call on registered memory costs more with ncclpy\.bindings too is NCCL's: it looks for each buffer among "
    r"what it has registered\.": (
        "Where a call on registered memory takes longer with ncclpy.bindings too, the difference is NCCL's, which "
        "looks each buffer up among those registered."
    ),
    r"by either way in turns\. The next call of each communicator sums up 8 bytes elsewhere, so what NCCL does when a "
    r"segment is first used is no part of it\. ncclpy registers with that call, NCCL's own calls before it\. The wait "
    r"for the call is left out\.": (
        "by ncclpy and by NCCL's own calls in turns. The next call of each communicator reduces 8 bytes of other "
        "memory, so NCCL's work at the first use of a segment is not included. ncclpy registers in that call, NCCL's "
        "own calls register before it. The wait for the call is not included."
    ),
    r"An allocation reaches ncclpy if a segment comes or goes with it; of ([\d,]+) allocations of 8 bytes to 4 MiB "
    r"from a pool that had those before, each given back at once\. Time is that of 8 bytes, both ways\.": (
        r"An allocation reaches ncclpy if it adds or removes a segment; of \1 allocations of 8 bytes to 4 MiB, each "
        "freed at once, from a pool that has allocated these sizes before. Time is that of 8 bytes, with and without "
        "the pool."
    ),
    # mpi
    r"for every rival; times": "for every library; times",
    r"a call returns when its data are there\.": "a call returns when its result is complete.",
    # process_group, scale
    r"^Of comparing calls a round is": "Comparing calls: a round is",
    r"^Of messages one rank sends": "Messages: one rank sends",
    r"all-reduces each as soon as it is there": "all-reduces each as soon as it exists",
    r"is what its rank 0 has less on its device once the pair is connected\.": (
        "is by how much the free memory of rank 0's device shrinks when the pair connects."
    ),
    r"it is not measured: there it would be both ends'\.": "it is not measured, as it would be that of both ranks.",
    r"^Memory is what a process has alone plus its part of what it shares \(Pss\), beyond what it had before": (
        "Memory is a process's proportional set size (Pss), minus what it was before"
    ),
    # recovery
    r"A rank's end is noticed by its lease in the store, half a second after it; one that is stopped by the deadline, "
    r"which counts from the collective, half a second before the SIGSTOP\.": (
        "A killed rank is detected by its lease in the store, half a second after its end; a stopped rank by the "
        "deadline, which counts from the start of the collective, half a second before the SIGSTOP."
    ),
    r"A process's start includes the import of ncclpy, and that NCCL and CUDA begin in it\.": (
        "A process's start includes the import of ncclpy and the initialisation of CUDA and NCCL."
    ),
    r"A rank's end is noticed by the host engine here, or by its lease in the store, half a second after it\.": (
        "A rank's end is detected by the host engine or, half a second after it, by the rank's lease in the store."
    ),
    r"recover\(\) of threads has every rank's Python in one interpreter on the cores of this machine\.": (
        "With threads, one interpreter on the cores of this machine runs recover() of every rank."
    ),
    # reports
    r"What ends has no communicators: to end those of all ranks in one process takes longer than to tell of it\.": (
        "The group that ends has no communicators: ending those of all ranks in one process would take longer than "
        "the notice."
    ),
    r"A rank is busy that all-reduces 8 bytes without a pause; what it does then changes at every look, once a "
    r"second\.": (
        "A busy rank all-reduces 8 bytes without a pause, so its status has changed at every check, once a second."
    ),
    r"is all that its process has taken meanwhile, over their number\.": (
        "is the CPU time of its process in the meantime, divided by the number of operations."
    ),
    r"The error names what all ranks do; one that has not answered within 0\.3 s is named with what it told last\.": (
        "The error says what each rank does; of a rank that has not answered within 0.3 s, what it reported last."
    ),
    # torch
    r"(\d+) of few bytes, (\d+) MiB of many, in": r"\1 small ones, or \2 MiB of large ones, in",
    r"which is waited for before the next; latency is that of a call which waits, and on GPUs for the device\.": (
        "which is waited for before the next call; latency is that of a call and the wait for its result, on GPUs "
        "also for the device."
    ),
    r"steps behind (\d+) that are not counted": r"steps after \1 that are not counted",
    r"which is torch's part of what communication takes\.": "which is torch's share of the time of communication.",
    r"^A sample is the median of the calls in a row of one pair of processes on rank 0: (\d+) small ones, or (\d+) "
    r"MiB of large ones, in (\d+) turns with the other backend in the same processes\. Host time is the call's with "
    r"async_op=True, which is waited for before the next call;": (
        r"A sample is the median over successive calls on rank 0 of one pair of processes: \1 small calls, or \2 MiB "
        r"of large ones, in \3 turns that alternate with those of the other backend in the same processes. Host time "
        "is the time of a call with async_op=True; its work is waited for before the next call;"
    ),
    r"^A sample is the median of (\d+) steps after (\d+) that are not counted, on rank 0, of a fixed batch; without "
    r"communication: the same under no_sync\(\); with buckets that are not sent: gradients": (
        r"A sample is the median of \1 steps with a fixed batch on rank 0, after \2 steps that are not counted. "
        "Without communication: the same under no_sync(). With buckets that are not sent: gradients"
    ),
    # several
    r"Times are means over calls in a row; then over the ranks, as nccl-tests counts\.": (
        "A time is the mean over successive calls, and then over the ranks, as in nccl-tests."
    ),
    r"Times are means over calls in a row; those of the slowest rank\.": (
        "A time is the mean over successive calls on the slowest rank."
    ),
    r"ncclpy, registered: memory\.alloc, so the registry registers it; ncclpy, windows: Communicator\.window\. NCCL "
    r"is told to schedule for NVLink \(nvlink_centric_sched\), as nccl-tests tells it\.": (
        'The buffers of "ncclpy, registered" are from memory.alloc, so the registry registers them; those of '
        '"ncclpy, windows" are windows of Communicator.window. NCCL is told to schedule for NVLink '
        "(nvlink_centric_sched), as by nccl-tests."
    ),
    r"one rank brings each a millisecond after the others\. Moments are the recorder's, of one clock; of each call "
    r"the last launch counts\.": (
        "one rank brings each of them a millisecond after the others. The times are from the recorders, by one clock; "
        "an all-reduce counts as launched when the last rank has launched it."
    ),
    r"^Gradients: (\d+) steps a round after (\d+) that are not counted, from a barrier to the end of the last work on "
    r"rank 0; float32, the maximum, in place\.": (
        r"Gradients: \1 steps a round, after \2 that are not counted. A step is timed from a barrier to the end of "
        "the last work on rank 0; it reduces float32 in place, to the maximum."
    ),
    r"times are those of rank 0, in a row of calls, Python's part included\.": (
        "times are those of successive calls on rank 0, and include the time in Python."
    ),
    r"; of ([\d,]+) allocations of 8 bytes to 4 MiB, each freed at once, from a pool that has allocated these sizes "
    r"before\. Time is that of 8 bytes": (
        r". Counted are \1 allocations of 8 bytes to 4 MiB, each freed at once, from a pool that has allocated these "
        "sizes before. Time is that of 8 bytes"
    ),
}


def shown(name: str) -> str:
    """Return the words for a name in a result: the name itself, unless it has others here."""
    return _NAMES.get(name, name)


def note(text: str) -> str:
    """Return a result's note in plainer words."""
    for pattern, words in _NOTES.items():
        text = re.sub(pattern, words, text)
    return text
