"""The ways to take part in a collective of the Manager.

Each reads and checks the buffers, which raises at once and leaves the key as it was, and adds a participant.
"""

from ncclpy.core.buffers cimport View, read_view
from ncclpy.core.device cimport as_device, known_devices
from ncclpy.core.operation cimport (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from ncclpy.core.shape cimport elements, fits, op_number, read_on_device, same_type, writable
from ncclpy.engine.work cimport Work

from ncclpy.core.resources import CustomOp
from ncclpy.core.types import ReduceOp, as_integer


cdef class Participants:
    """Methods that add participants; `Manager` is the class to use."""

    cdef Work add(
        self, key, int kind, const View* view, const void* send, void* recv, size_t count, int op, int device,
        int num_local, int num_global, communicator_key, global_rank, int root, bint is_root, producer, on_done,
        timeout, held, output,
    ):
        """Add a participant, and launch if it is the last one."""
        raise NotImplementedError

    def all_reduce(
        self, key, send, recv=None, op=ReduceOp.SUM, *, device=None, num_local, num_global=None,
        communicator_key=None, global_rank=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in an all-reduce.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            The input, contiguous, on `device`; it receives the result if `recv` is None.
        recv : buffer, optional
            The output, with as many elements of the same type.
        op : ReduceOp or str
            The reduction, the same for all participants.
        device : int, optional
            The participant's device; by default that of `send`, or the current one for CPU memory.
        num_local : int
            The number of participants in this process.
        num_global : int, optional
            The number of participants in all processes; `num_local` by default.
        communicator_key : bytes, optional
            128 bytes that several processes have in common; only if there are several.
        global_rank : int, optional
            This participant's rank; by default participants are numbered by device. Needed with several processes.
        producer : optional
            The stream that produces the input: communication waits for what is on it now. By default the current
            stream of the array's framework; none for CPU memory.
        on_done : callable, optional
            Called with the `Work` when it is done.
        timeout : float, optional
            Seconds, as the Manager's own, which it replaces.

        Returns
        -------
        Work
            Its result is the array that receives.

        Raises
        ------
        TypeError, ValueError
            If a buffer does not fit; then the participant has not been added.
        NcclAborted
            If the Manager is aborted.
        """
        cdef View s, r
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        if recv is None:
            writable(&s, "send")
            r = s
        else:
            read_on_device(recv, &r, "recv", where)
            writable(&r, "recv")
            same_type(&r, &s, "recv", "send")
            fits(&r, 1, &s, "recv", "send", "all_reduce")
        return self.add(
            key, ALL_REDUCE, &s, s.pointer, r.pointer, s.count, _operator(op, &s, nranks), where, num_local, nranks,
            communicator_key, global_rank, -1, False, producer, on_done, timeout, send,
            send if recv is None else recv,
        )

    def all_gather(
        self, key, send, recv, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in an all-gather.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            The input.
        recv : buffer
            The output, ``num_global`` times as many elements, in the order of the ranks.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        read_on_device(recv, &r, "recv", where)
        writable(&r, "recv")
        same_type(&r, &s, "recv", "send")
        fits(&r, nranks, &s, "recv", "send", "all_gather")
        return self.add(
            key, ALL_GATHER, &s, s.pointer, r.pointer, s.count, 0, where, num_local, nranks, communicator_key,
            global_rank, -1, False, producer, on_done, timeout, send, recv,
        )

    def reduce_scatter(
        self, key, send, recv, op=ReduceOp.SUM, *, device=None, num_local, num_global=None,
        communicator_key=None, global_rank=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in a reduce-scatter.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            The input, ``num_global`` times as many elements as `recv`.
        recv : buffer
            This rank's part of the result.
        op : ReduceOp or str
            The reduction, the same for all participants.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        read_on_device(recv, &r, "recv", where)
        writable(&r, "recv")
        same_type(&r, &s, "recv", "send")
        fits(&s, nranks, &r, "send", "recv", "reduce_scatter")
        return self.add(
            key, REDUCE_SCATTER, &s, s.pointer, r.pointer, r.count, _operator(op, &s, nranks), where, num_local,
            nranks, communicator_key, global_rank, -1, False, producer, on_done, timeout, send, recv,
        )

    def all_to_all(
        self, key, send, recv, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in an all-to-all; not in place.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            Part i goes to rank i; a multiple of ``num_global`` elements.
        recv : buffer
            Part i comes from rank i; as many elements.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        read_on_device(recv, &r, "recv", where)
        writable(&r, "recv")
        same_type(&r, &s, "recv", "send")
        fits(&r, 1, &s, "recv", "send", "all_to_all")
        if elements(&s) % <size_t>nranks:
            raise ValueError(
                f"send: all_to_all needs a multiple of {nranks} elements, one part a rank, got {elements(&s)}"
            )
        if s.pointer == r.pointer and s.count:
            raise ValueError("recv: all_to_all cannot be done in place; pass another buffer")
        return self.add(
            key, ALL_TO_ALL, &s, s.pointer, r.pointer, s.count // nranks, 0, where, num_local, nranks,
            communicator_key, global_rank, -1, False, producer, on_done, timeout, send, recv,
        )

    def broadcast_send(
        self, key, send, recv=None, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, root=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in a broadcast as its root.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            What is sent.
        recv : buffer, optional
            A copy of it here; none by default.
        root : int, optional
            The rank of the root, which all may say; where the root is on another node they must.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        r = s
        if recv is not None:
            read_on_device(recv, &r, "recv", where)
            writable(&r, "recv")
            same_type(&r, &s, "recv", "send")
            fits(&r, 1, &s, "recv", "send", "broadcast")
        return self.add(
            key, BROADCAST, &s, s.pointer, r.pointer, s.count, 0, where, num_local, nranks, communicator_key,
            global_rank, as_rank(root, "root"), True, producer, on_done, timeout, send, send if recv is None else recv,
        )

    def broadcast_recv(
        self, key, recv, *, device=None, num_local, num_global=None, communicator_key=None, global_rank=None,
        root=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in a broadcast as one that receives.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        recv : buffer
            Where the data arrive.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View r
        cdef int where = _device(device, recv, "recv")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(recv, &r, "recv", where)
        writable(&r, "recv")
        return self.add(
            key, BROADCAST, &r, r.pointer, r.pointer, r.count, 0, where, num_local, nranks, communicator_key,
            global_rank, as_rank(root, "root"), False, producer, on_done, timeout, recv, recv,
        )

    def reduce_send(
        self, key, send, op=ReduceOp.SUM, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, root=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in a reduce as one that only contributes.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            The input.
        op : ReduceOp or str
            The reduction, the same for all participants.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        return self.add(
            key, REDUCE, &s, s.pointer, NULL, s.count, _operator(op, &s, nranks), where, num_local, nranks,
            communicator_key, global_rank, as_rank(root, "root"), False, producer, on_done, timeout, send, None,
        )

    def reduce_recv(
        self, key, send, recv=None, op=ReduceOp.SUM, *, device=None, num_local, num_global=None,
        communicator_key=None, global_rank=None, root=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in a reduce as its root, which contributes too.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            The root's own input; it receives the result if `recv` is None.
        recv : buffer, optional
            The output, with as many elements of the same type.
        op : ReduceOp or str
            The reduction, the same for all participants.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        if recv is None:
            writable(&s, "send")
            r = s
        else:
            read_on_device(recv, &r, "recv", where)
            writable(&r, "recv")
            same_type(&r, &s, "recv", "send")
            fits(&r, 1, &s, "recv", "send", "reduce")
        return self.add(
            key, REDUCE, &s, s.pointer, r.pointer, s.count, _operator(op, &s, nranks), where, num_local, nranks,
            communicator_key, global_rank, as_rank(root, "root"), True, producer, on_done, timeout, send,
            send if recv is None else recv,
        )

    def gather_send(
        self, key, send, *, device=None, num_local, num_global=None, communicator_key=None, global_rank=None,
        root=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in a gather as one that only sends.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            This rank's part.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        return self.add(
            key, GATHER, &s, s.pointer, NULL, s.count, 0, where, num_local, nranks, communicator_key, global_rank,
            as_rank(root, "root"), False, producer, on_done, timeout, send, None,
        )

    def gather_recv(
        self, key, send, recv, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, root=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in a gather as its root.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            The root's own part.
        recv : buffer
            The output, ``num_global`` times as many elements, in the order of the ranks.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        read_on_device(recv, &r, "recv", where)
        writable(&r, "recv")
        same_type(&r, &s, "recv", "send")
        fits(&r, nranks, &s, "recv", "send", "gather")
        return self.add(
            key, GATHER, &s, s.pointer, r.pointer, s.count, 0, where, num_local, nranks, communicator_key,
            global_rank, as_rank(root, "root"), True, producer, on_done, timeout, send, recv,
        )

    def scatter_send(
        self, key, send, recv, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, root=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in a scatter as its root.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        send : buffer
            Part i goes to rank i; ``num_global`` times as many elements as `recv`.
        recv : buffer
            The root's own part.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef int where = _device(device, send, "send")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(send, &s, "send", where)
        read_on_device(recv, &r, "recv", where)
        writable(&r, "recv")
        same_type(&r, &s, "recv", "send")
        fits(&s, nranks, &r, "send", "recv", "scatter")
        return self.add(
            key, SCATTER, &s, s.pointer, r.pointer, r.count, 0, where, num_local, nranks, communicator_key,
            global_rank, as_rank(root, "root"), True, producer, on_done, timeout, send, recv,
        )

    def scatter_recv(
        self, key, recv, *, device=None, num_local, num_global=None, communicator_key=None, global_rank=None,
        root=None, producer=None, on_done=None, timeout=None,
    ):
        """Take part in a scatter as one that receives.

        Parameters
        ----------
        key : hashable
            Names this execution of the collective.
        recv : buffer
            Where this rank's part arrives.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, producer, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View r
        cdef int where = _device(device, recv, "recv")
        cdef int nranks = _nranks(num_local, num_global)
        read_on_device(recv, &r, "recv", where)
        writable(&r, "recv")
        return self.add(
            key, SCATTER, &r, NULL, r.pointer, r.count, 0, where, num_local, nranks, communicator_key, global_rank,
            as_rank(root, "root"), False, producer, on_done, timeout, recv, recv,
        )


cdef int _device(device, array, str argument) except -2:
    """Return the participant's device: as given, or that of the array."""
    cdef View view
    if device is not None:
        return as_device(device)
    read_view(array, &view, argument)
    return view.device if view.device >= 0 else as_device(None)


cdef int as_rank(rank, str argument) except -2:
    """Return a rank that may be left out: then it is -1."""
    cdef int number
    if rank is None:
        return -1
    number = _number(rank, argument)
    if number < 0:
        raise ValueError(f"{argument}: expected a rank >= 0 or None, got {number}")
    return number


cdef int _nranks(num_local, num_global) except -1:
    """Return the number of all participants."""
    cdef int local = _number(num_local, "num_local")
    cdef int everywhere = local if num_global is None else _number(num_global, "num_global")
    if local < 1 or everywhere < local:
        raise ValueError(
            f"num_local, num_global: expected 1 <= num_local <= num_global, got {local} and {everywhere}"
        )
    if local > known_devices():
        raise ValueError(
            f"num_local: {local} participants in this process need a device each, and it sees {known_devices()}"
        )
    return everywhere


cdef int _number(value, str argument) except? -1:
    """Return an int, but not of a float, which would be cut."""
    try:
        return value if type(value) is int else as_integer(value, argument)
    except OverflowError:
        raise ValueError(f"{argument}: a number of {int(value).bit_length()} bits is too large") from None


cdef int _operator(op, const View* view, int nranks) except -1:
    if type(op) is CustomOp:
        raise TypeError("op: an operator belongs to one communicator; the Manager makes communicators of its own")
    cdef int code = op_number(op, view, nranks)
    if code > <int>ReduceOp.AVG:
        raise ValueError(f"op: {code} is no reduction operator of NCCL's own")
    return code
