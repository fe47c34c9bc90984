// Environment variables that switch something on. They are read once, when the engine is loaded.
#pragma once

#include <cstdlib>
#include <cstring>

namespace ncclpy::host {

// Whether a variable is set to something other than "" or "0".
inline bool is_on(const char* variable) {
  const char* const text = std::getenv(variable);
  return text != nullptr && *text != 0 && std::strcmp(text, "0") != 0;
}

}  // namespace ncclpy::host
