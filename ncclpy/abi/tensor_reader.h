/* The interface of a function that reads tensors of one framework natively. interop, which knows the framework, makes
 * the function; core/arguments/buffers, which knows no framework, calls it.
 */
#ifndef NCCLPY_TENSOR_READER_H
#define NCCLPY_TENSOR_READER_H

#include <stdint.h>

/* The name of a capsule with such a function. The number is raised when anything below changes. */
#define NCCLPY_TENSOR_READER_NAME "ncclpy.tensor_reader.1"

#define NCCLPY_ON_CPU (-1)

typedef struct {
  void* data; /* address of the first element; NULL if the tensor has no element */
  uint64_t count; /* elements */
  int32_t device; /* the GPU's ordinal, or NCCLPY_ON_CPU */
  uint8_t code;   /* code and bits of the data type, as in DLPack; it has one lane */
  uint8_t bits;
} ncclpy_read_tensor;

/* Fills in `out` and returns 0 if the tensor's elements lie in one block of memory. Any other result only means that
 * the caller must read the tensor in another way. The function is called with the GIL; it sets no Python exception and
 * throws no C++ exception.
 */
typedef int (*ncclpy_tensor_reader)(void* py_object, ncclpy_read_tensor* out);

#endif /* NCCLPY_TENSOR_READER_H */
