"""Measurements of a group that continues without a rank, or with a new one: names of rows, and their limits."""

from __future__ import annotations

PROCESSES, THREADS = "processes, TCPStore", "threads, TCPStore"
NOTICED = "from the kill to the last survivor's error"
WHOLE = "from that to the last return of recover()"
KILL = "from the kill to the next finished all-reduce"
SHRINK = "ncclCommShrink by one rank, and an all-reduce"
ANEW = "a communicator of one rank less anew, and an all-reduce"
RECOVER, FIRST = "recover() of a group that is well", "the first all-reduce after it"
STOP_NOTICED = "from the SIGSTOP to the last survivor's error, a deadline of 2 s"
STOP = "from the SIGSTOP to the next finished all-reduce, deadline and patience 2 s each"
JOIN = "from a new process's start to the all-reduce with it"
JOINED = "of that in join() and the all-reduce"
#: Seconds for an operation, and for a rank to reach recover(), in the runs that stop a rank.
STOPPED_DEADLINE = 2.0
#: By the way that a rank is lost: limits until the error, from the error through recover(), to the next all-reduce.
LOSSES = {"kill": (NOTICED, WHOLE, KILL), "stop": (STOP_NOTICED, WHOLE + " after a SIGSTOP", STOP)}
