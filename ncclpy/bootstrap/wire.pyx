# distutils: language = c++
"""The server and the client of a `TCPStore`. Their C++ is in native/ and needs no GIL."""

import threading

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.string cimport string

cdef extern from "native/clock.hpp" namespace "ncclpy::store" nogil:
    double now()

cdef extern from "native/descriptors.hpp" namespace "ncclpy::store" nogil:
    int generation()

cdef extern from "native/sha256.hpp" namespace "ncclpy::store" nogil:
    string hmac_of "ncclpy::store::hmac"(const string&, const string&) except +

cdef extern from "<string_view>" namespace "std" nogil:
    cdef cppclass string_view:
        string_view()
        string_view(const char*, size_t)
        const char* data()
        size_t size()

cdef extern from "native/frame.hpp" namespace "ncclpy::store" nogil:
    cdef enum class Op(uint8_t):
        pass

    cdef enum class Status(uint8_t):
        pass

    cdef cppclass Writer:
        string body
        Writer& integer(int64_t) except +
        Writer& bytes(string_view) except +

    cdef cppclass Reader:
        Reader()
        Reader(string_view)
        cbool integer(int64_t&)
        cbool bytes(string_view&)
        char kind()

cdef extern from "native/server.hpp" namespace "ncclpy::store" nogil:
    cdef cppclass ServerOptions:
        string token
        double heartbeat
        size_t max_value
        size_t max_answer
        size_t capacity
        size_t max_backlog

    cdef cppclass NativeServer "ncclpy::store::Server":
        NativeServer(const ServerOptions&) except +
        void listen(int) except +
        cbool start() except +
        void refuse_new()
        void stop()
        int clients()
        cbool next_line(string&, double) except +
        cbool stopped()

cdef extern from "native/client.hpp" namespace "ncclpy::store" nogil:
    cdef cppclass Answer:
        Op op
        Status status
        string body

    cdef cppclass Source:
        pass

    cdef cppclass Publisher:
        Publisher(string, string, const Source&) except +

    cdef enum class WaitResult "ncclpy::store::Client::WaitResult":
        answered
        waiting
        lost

    cdef cppclass NativeClient "ncclpy::store::Client":
        NativeClient(int, double, size_t) except +
        cbool start() except +
        uint64_t submit(Op, string_view) except +
        WaitResult wait(uint64_t, double) except +
        cbool take(uint64_t, Answer&) except +
        void forget(uint64_t, cbool) except +
        uint64_t start_publisher(const string&, Publisher) except +
        void end_publisher(uint64_t) except +
        void close(const char*, double)
        string lost() except +
        cbool lease_ended()

# Seconds of one slice of a wait: in the main thread, which runs signal handlers after each slice, and in other
# threads, which run none. A slice ends with taking the GIL, so many threads with short slices would delay each other.
cdef double SLICE = 0.1, LONG_SLICE = 60.0


def hmac(bytes key not None, bytes message not None):
    """Return the HMAC-SHA256 with which both ends prove that they know the token."""
    return <bytes>hmac_of(key, message)


def parts(list fields not None, size_t step, size_t limit, size_t most):
    """Divide fields into requests of at most `most` fields and `limit` bytes.

    Groups of `step` fields stay together; a request of one group may exceed the limits.
    """
    cdef size_t size = 0, start = 0, at, more
    cdef Py_ssize_t total = len(fields)
    found = []
    for at in range(0, <size_t>total, step):
        more = 0
        for field in fields[at:at + step] if step > 1 else (fields[at],):
            more += 5 + len(<bytes>field)
        if at > start and (size + more > limit or at - start + step > most):
            found.append(fields[start:at])
            start, size = at, 0
        size += more
    found.append(fields[start:] if start else fields)
    return found


cdef class Server:
    """A store's server, in a thread of its own."""

    cdef NativeServer* server
    cdef int made_in

    def __cinit__(self, list sockets not None, *, bytes token not None, double heartbeat, size_t max_value,
                  size_t max_answer, size_t capacity, size_t max_backlog):
        """Take over listening sockets, and serve."""
        cdef ServerOptions options
        options.token = token
        options.heartbeat = heartbeat
        options.max_value = max_value
        options.max_answer = max_answer
        options.capacity = capacity
        options.max_backlog = max_backlog
        self.made_in = generation()
        self.server = new NativeServer(options)
        for each in sockets:
            self.server.listen(each.detach())
        if not self.server.start():
            raise OSError("no thread, or no descriptor, can be had to serve a store with; see ulimit -u and ulimit -n")

    def __dealloc__(self):
        if self.server != NULL and self.made_in == generation():
            with nogil:
                self.server.stop()
            del self.server  # not in a forked child, which does not have the server's thread

    def refuse_new(self):
        """Accept no new clients; connected ones stay."""
        if self.made_in == generation():
            with nogil:
                self.server.refuse_new()

    def stop(self):
        """Tell all clients that the server ends, and end."""
        if self.made_in == generation():
            with nogil:
                self.server.stop()

    @property
    def clients(self):
        """How many clients are connected."""
        return self.server.clients()

    @property
    def stopped(self):
        """Whether the server has ended."""
        return self.server.stopped()

    def next_line(self, double seconds):
        """Return the next line for the log; "" if there is none in time, or will be none."""
        cdef string line
        cdef cbool found
        with nogil:
            found = self.server.next_line(line, seconds)
        return (<bytes>line).decode(errors="replace") if found else ""


cdef class Client:
    """A client's connection to a server, with a completed handshake."""

    cdef shared_ptr[NativeClient] client
    cdef int made_in
    cdef unsigned long main_thread

    def __cinit__(self, int fd, double heartbeat, size_t max_frame):
        self.made_in = generation()
        self.main_thread = threading.main_thread().ident
        self.client = make_shared[NativeClient](fd, heartbeat, max_frame)
        if not self.client.get().start():
            raise OSError("no thread, or no descriptor, can be had for a store's client; see ulimit -u and ulimit -n")

    def __dealloc__(self):
        if self.client.get() == NULL:
            return
        if self.made_in != generation():
            new shared_ptr[NativeClient](self.client)  # leaked, so that a forked child does not destroy the client
            return
        with nogil:
            self.client.get().close("the store was closed", 0.0)

    def lost(self):
        """Return why the connection is lost; "" while it is not."""
        if self.made_in != generation():
            return "it belongs to the process that this one is a fork of"
        return (<bytes>self.client.get().lost()).decode(errors="replace")

    cdef object loss(self):
        """Return the error of a lost connection: ConnectionAbortedError if this process's lease has ended."""
        over = self.made_in == generation() and self.client.get().lease_ended()
        return (ConnectionAbortedError if over else ConnectionError)(self.lost())

    def submit(self, int op, tuple fields not None):
        """Send a request and return its number; 0 if the connection is lost."""
        if self.made_in != generation():
            return 0
        cdef Writer out
        cdef uint64_t number
        encode(out, fields)
        with nogil:
            number = self.client.get().submit(<Op>op, string_view(out.body.data(), out.body.size()))
        return number

    def wait(self, uint64_t number, double deadline):
        """Return (status, fields) of an answer; None at the deadline. Signal handlers run meanwhile."""
        if self.made_in != generation():
            raise self.loss()
        cdef double until = min(deadline, now() + self.slice())
        cdef WaitResult outcome
        with nogil:
            outcome = self.client.get().wait(number, until)
        return self.answer(number, outcome, deadline)

    def call(self, int op, tuple fields not None, double deadline):
        """Send a request and wait for its answer; None at the deadline, when the request is cancelled."""
        if self.made_in != generation():
            raise self.loss()
        cdef Writer out
        cdef uint64_t number
        cdef WaitResult outcome = WaitResult.lost
        cdef double until = min(deadline, now() + self.slice())
        encode(out, fields)
        with nogil:  # one block for both calls: between two blocks the thread would wait for the GIL
            number = self.client.get().submit(<Op>op, string_view(out.body.data(), out.body.size()))
            if number:
                outcome = self.client.get().wait(number, until)
        if not number:
            raise self.loss()
        try:
            answer = self.answer(number, outcome, deadline)
        except BaseException:
            self.forget(number)
            raise
        if answer is None:
            self.forget(number)
        return answer

    cdef double slice(self):
        return SLICE if PyThread_get_thread_ident() == self.main_thread else LONG_SLICE

    cdef answer(self, uint64_t number, WaitResult outcome, double deadline):
        """Take the answer if the first slice, which ended with `outcome`, brought it; else wait until the deadline."""
        cdef Answer answer
        cdef double until
        while True:
            if outcome == WaitResult.answered and self.client.get().take(number, answer):
                return <int>answer.status, decode(answer.body)
            if outcome == WaitResult.lost:
                raise self.loss()
            PyErr_CheckSignals()
            if now() >= deadline:
                return None
            until = min(deadline, now() + self.slice())
            with nogil:
                outcome = self.client.get().wait(number, until)

    def calls(self, int op, list requests not None, double deadline):
        """Send several requests at once and wait for all; None in place of an answer that has not arrived."""
        numbers = [self.submit(op, fields) for fields in requests]
        answers = []
        try:
            for number in numbers:
                if not number:
                    raise self.loss()
                answers.append(self.wait(number, deadline))
        finally:
            for number in numbers[len(answers):]:
                self.forget(number)
        for number, answer in zip(numbers, answers):
            if answer is None:
                self.forget(number)
        return answers

    def forget(self, uint64_t number, bint tell=True):
        """Give up a request or a watch; if `tell`, the server is told to give it up too."""
        if self.made_in != generation():
            return
        with nogil:
            self.client.get().forget(number, tell)

    def close(self, str why not None, double patience):
        """Say goodbye, wait at most `patience` seconds for the server's answer, and close the connection."""
        cdef bytes words = why.encode()
        cdef const char* text = words
        if self.made_in == generation():
            with nogil:
                self.client.get().close(text, patience)


@cython.no_gc_clear  # __dealloc__ needs the client, which uses the source until then
cdef class StatusPublication:
    """A value that a client publishes until this object is closed, also while a thread of the process keeps the GIL.

    Parameters
    ----------
    client : Client
        The connection.
    key, rest : bytes
        The key of the value, and what is appended to each value.
    asked : bytes
        The key that other ranks change to have the value published at once.
    source : object
        Its method `source` returns a capsule with a native `Source`, which must live as long as this object.
    """

    cdef Client client
    cdef uint64_t number
    cdef object source

    def __init__(self, Client client not None, bytes key not None, bytes rest not None, bytes asked not None, source):
        if self.client is not None:
            raise RuntimeError("a StatusPublication is initialised once")
        if client.made_in != generation():
            raise client.loss()
        cdef Source* given = <Source*>PyCapsule_GetPointer(source.source(), b"ncclpy.source")
        cdef Publisher* publisher = new Publisher(key, rest, given[0])
        cdef string where = asked
        self.client, self.source = client, source
        try:
            with nogil:
                self.number = client.client.get().start_publisher(where, publisher[0])
        finally:
            del publisher
        if not self.number:
            raise client.loss()

    def __dealloc__(self):
        self.end()

    def close(self):
        """Stop publishing: a value that is put under the key after this call is not overwritten."""
        self.end()

    cdef int end(self) except -1:
        cdef uint64_t number = self.number
        self.number = 0
        if number and self.client.made_in == generation():  # not in a forked child: the parent still publishes
            with nogil:
                self.client.client.get().end_publisher(number)
        return 0


cdef int encode(Writer& out, tuple fields) except -1:
    cdef const unsigned char[::1] view
    for field in fields:
        if type(field) is int:
            out.integer(<int64_t>field)
        elif type(field) is bytes:
            out.bytes(string_view(<const char*><bytes>field, len(<bytes>field)))
        else:
            raise TypeError(f"a field is an int or bytes, not {field!r}")
    return 0


cdef list decode(const string& body):
    cdef Reader reader = Reader(string_view(body.data(), body.size()))
    cdef int64_t number = 0
    cdef string_view text
    fields = []
    while True:
        if reader.integer(number):
            fields.append(number)
        elif reader.bytes(text):
            fields.append((<const char*>text.data())[:text.size()])
        else:
            return fields
