// The thread's last error, and the fixed sentence of each result code.
#include "errors.hpp"

#include <cstdarg>
#include <cstdio>

namespace ncclpy::host {

namespace {
thread_local std::string last;
}

ncclResult_t fail(ncclResult_t result, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  last = text;
  return result;
}

const std::string& last_error() { return last; }

void set_last_error(const std::string& text) { last = text; }

}  // namespace ncclpy::host

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    case ncclTimeout: return "timeout";
    default: return "unknown result code";
  }
}
