/* How a function that knows the layout of a framework's tensors tells what one of them is. It is made where the framework is,
 * in interop, and called by core/arguments/buffers, which knows no framework.
 */
#ifndef NCCLPY_TENSOR_READER_H
#define NCCLPY_TENSOR_READER_H

#include <stdint.h>

/* What a capsule with such a function is called. The number is another one when anything below changes. */
#define NCCLPY_TENSOR_READER_NAME "ncclpy.tensor_reader.1"

#define NCCLPY_ON_CPU (-1)

typedef struct {
  void* data; /* of the first element; NULL if there is none */
  uint64_t count;
  int32_t device; /* the GPU's ordinal, or NCCLPY_ON_CPU */
  uint8_t code;   /* of the data type, as DLPack has it, with one lane */
  uint8_t bits;
} ncclpy_read_tensor;

/* Returns 0 if the tensor is one block of memory that holds its values. Anything else says nothing of what it is, only that
 * somebody else is to look at it. It is called with the GIL, leaves no exception of Python's behind and throws none of C++.
 */
typedef int (*ncclpy_tensor_reader)(void* py_object, ncclpy_read_tensor* out);

#endif /* NCCLPY_TENSOR_READER_H */
