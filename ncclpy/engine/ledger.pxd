from libc.stdint cimport uint64_t

cdef extern from "ncclpy/engine/ledger.h" nogil:
    ctypedef struct ncclpy_noted:
        uint64_t sequence
        uint64_t count
        uint64_t began
        uint64_t done
        uint64_t call
        uint64_t beside

    ctypedef struct ncclpy_standing:
        bint has_current
        bint has_finished
        ncclpy_noted current
        ncclpy_noted finished

    ctypedef struct ncclpy_note:
        pass

    ctypedef struct ncclpy_row:
        uint64_t last
        ncclpy_noted finished

    ctypedef struct ncclpy_ledger:
        ncclpy_row rows[2]

    const uint64_t NCCLPY_BEHIND

    ncclpy_ledger* ncclpy_ledger_new()
    void ncclpy_ledger_use(ncclpy_ledger* ledger)
    void ncclpy_ledger_leave(ncclpy_ledger* ledger)
    ncclpy_note* ncclpy_ledger_begin(ncclpy_ledger* ledger, int pair, const ncclpy_noted* what)
    void ncclpy_ledger_place(ncclpy_ledger* ledger, ncclpy_note* note, int behind)
    void ncclpy_ledger_end(ncclpy_ledger* ledger, int pair, ncclpy_note* note, int done, double moment)
    bint ncclpy_ledger_read(const ncclpy_ledger* ledger, ncclpy_standing* standing)
    uint64_t ncclpy_bits_of(double moment)
    double ncclpy_moment_of(uint64_t bits)


cdef inline uint64_t call_of(int kind, int datatype, bint is_barrier) noexcept nogil:
    return <uint64_t>kind | <uint64_t>datatype << 16 | <uint64_t>is_barrier << 32


cdef inline uint64_t beside_of(int op, int root) noexcept nogil:
    return <uint64_t><unsigned int>op << 32 | <unsigned int>root


# What a store's client is given to tell by itself.
cdef struct Source:  # see bootstrap/native/teller.hpp
    void* what
    size_t (*tell)(void* what, char* at, size_t room, size_t* lasting) noexcept nogil


# What a rank does in one process group.
cdef class Ledger:
    cdef ncclpy_ledger* ledger
    cdef Source given

    # The number of the last collective that is done, None if there is none.
    cdef object last_finished(self)
