/* The table of copies that one kernel makes. The table is the kernel's only parameter.
 *
 * Each thread block copies one chunk of one copy. On GPUs coordinator/copy_kernel.py has the kernel, in PTX; the host
 * engine iterates over the table itself. */
#ifndef NCCLPY_COPY_MANY_H
#define NCCLPY_COPY_MANY_H

#include <stdint.h>

/* The table has 4040 bytes with as many copies; the parameters of a kernel may have 4096. */
#define NCCLPY_COPIES_MAX 144
#define NCCLPY_COPY_CHUNK 32768 /* bytes */
#define NCCLPY_COPY_THREADS 256

typedef struct {
  uint32_t count;
  uint32_t unused; /* aligns the addresses */
  uint64_t from[NCCLPY_COPIES_MAX]; /* address of the source; 0: write zeros */
  uint64_t to[NCCLPY_COPIES_MAX];
  uint64_t bytes[NCCLPY_COPIES_MAX];
  uint32_t first_block[NCCLPY_COPIES_MAX]; /* the first thread block of each copy, ascending from 0 */
} ncclpy_copies;

#endif /* NCCLPY_COPY_MANY_H */
