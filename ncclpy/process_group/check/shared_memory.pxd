from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from ncclpy.core.arguments.datatypes cimport NAME


cdef extern from * nogil:
    """
    #include <errno.h>
    #include <linux/futex.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    /* Unlike the words of native.h these are slept on by several processes. */
    static inline void ncclpy_shared_sleep(int* word, int value, double seconds) {
      struct timespec t;
      if (seconds <= 0) return;
      t.tv_sec = (time_t)seconds;
      t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
      syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
    }
    static inline void ncclpy_shared_wake(int* word) { syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0); }
    static inline uint64_t ncclpy_shared_load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }
    static inline void ncclpy_shared_store(uint64_t* word, uint64_t value) {
      __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    }
    static inline void* ncclpy_shared_map(int fd, size_t offset, size_t size) {
      void* at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
      return at == MAP_FAILED ? NULL : at;
    }
    """
    void sleep_shared "ncclpy_shared_sleep"(int* word, int value, double seconds)
    void wake_shared "ncclpy_shared_wake"(int* word)
    uint64_t load_shared "ncclpy_shared_load"(const uint64_t* word)
    void store_shared "ncclpy_shared_store"(uint64_t* word, uint64_t value)
    void* map_shared "ncclpy_shared_map"(int fd, size_t offset, size_t size)
    int munmap(void* at, size_t size)

# What the memory begins with: the word that it is known by.
cdef enum:
    TOKEN = 16

# What one rank brings to a message, as it lies in shared memory.
cdef struct Note:
    uint64_t number  # in its ring, plus 1: published last, so that a note is read whole or not at all
    uint64_t place  # in its channel
    uint64_t count
    int channel
    int kind
    int tag
    char type[NAME + 1]  # the name of the data type

# The word that a rank sleeps on.
cdef struct Bell:
    char token[16]
    int changes
    int sleepers
    int expects  # something is held back here: else no note is worth waking anybody for
    int watchers  # who look at it awake: as long as there are any, no sleeper has to be woken


cdef class Page:
    cdef char* base
    cdef size_t length


# One rank's: its bell, and a ring of notes of each other rank.
cdef class Mailbox:
    cdef int size
    cdef int fd  # -1 if there is no memory that others could open
    cdef int owner  # the process that may close it
    cdef bytes token
    cdef Page head
    cdef Bell alone  # the bell where there is no such memory
    cdef Bell* bell

    # What others need to open it; empty if they cannot.
    cdef dict offered(self)
    cdef int heard(self) noexcept
    cdef void ring(self) noexcept
    # Wait until it has been rung since it was `heard`, for so many seconds.
    cdef int wait(self, int heard, double seconds) except -1
    # Look for an instant whether it is rung, instead of who sleeps, from `watch` to `leave`.
    cdef void watch(self) noexcept
    cdef bint is_rung(self, int heard, double until) noexcept
    cdef void leave(self, int heard) noexcept
    # Whether notes of others are to wake who sleeps.
    cdef void expect(self, bint expects) noexcept
    cdef int close(self) except -1


# What two ranks of one machine have between them, as one of them uses it. Its calls are in no order of their own: whoever
# makes them sees to that.
cdef class Post:
    cdef Page inbox
    cdef Page outbox
    cdef Page wakeup  # with the other's bell
    cdef uint64_t written
    cdef uint64_t read

    # Put a note where the other one looks; False if there is no room.
    cdef bint put(self, Note* note) noexcept
    # Have the other one look.
    cdef void ring(self) noexcept
    # Take the next note of the other one's; False if there is none.
    cdef bint next(self, Note* note) noexcept
