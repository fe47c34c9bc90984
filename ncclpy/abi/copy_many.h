/* Copies that one kernel makes: the table that is its only parameter.
 *
 * A block of threads copies a chunk of one of them. The kernel is coordinator/copy_kernel.py's on GPUs, in PTX; the host
 * engine goes through the table itself.
 */
#ifndef NCCLPY_COPY_MANY_H
#define NCCLPY_COPY_MANY_H

#include <stdint.h>

/* As many as fit into the 4 KiB that a kernel's parameters may have. */
#define NCCLPY_COPIES_MAX 144
#define NCCLPY_COPY_CHUNK 32768
#define NCCLPY_COPY_THREADS 256

typedef struct {
  uint32_t count;
  uint32_t unused;
  uint64_t from[NCCLPY_COPIES_MAX]; /* 0 for zeros */
  uint64_t to[NCCLPY_COPIES_MAX];
  uint64_t bytes[NCCLPY_COPIES_MAX];
  uint32_t first[NCCLPY_COPIES_MAX]; /* block of each; they ascend, from 0 on */
} ncclpy_copies;

#endif /* NCCLPY_COPY_MANY_H */
