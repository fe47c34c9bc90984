// Errors: the result code goes back to the caller; the sentence that explains it is kept for ncclGetLastError.
#pragma once

#include <string>

#include "abi.hpp"

namespace ncclpy::host {

// Keeps the sentence, of at most 1023 bytes, as the calling thread's last error and returns `result`.
__attribute__((format(printf, 2, 3))) ncclResult_t fail(ncclResult_t result, const char* format, ...);

// The calling thread's last error, "" if there was none. Code that makes another thread work for it must copy that
// thread's last error itself.
const std::string& last_error();
void set_last_error(const std::string& text);

#define NCCLPY_TRY(call) \
  do { \
    ncclResult_t ncclpy_result = (call); \
    if (ncclpy_result != ncclSuccess) return ncclpy_result; \
  } while (0)

}  // namespace ncclpy::host
