# Memory that several processes of a machine have, and words in it that they sleep on.
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

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
