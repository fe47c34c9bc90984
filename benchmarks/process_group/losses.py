"""What is measured of a group that goes on without a rank, or with a new one: names of rows, and the limits there."""

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
#: Seconds in which an operation must be done, and in which a rank must come to recover(), where one is stopped.
STOPPED_DEADLINE = 2.0
#: By how a rank is lost: to the error, from that to recover(), to the next all-reduce.
LOSSES = {"kill": (NOTICED, WHOLE, KILL), "stop": (STOP_NOTICED, WHOLE + " after a SIGSTOP", STOP)}
