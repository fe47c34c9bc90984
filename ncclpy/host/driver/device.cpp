// Virtual devices: their number from the environment, their identity from the machine.
#include "device.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace ncclpy::host {
namespace {

constexpr int default_devices = 8, max_devices = 1024;

int read_device_count() {
  const char* text = std::getenv("NCCLPY_HOST_DEVICES");
  if (text == nullptr || *text == '\0') return default_devices;  // an empty variable counts as unset
  int count = 0;
  for (const char* c = text; *c >= '0' && *c <= '9' && count <= max_devices; ++c) {
    count = 10 * count + (*c - '0');
    if (c[1] == '\0' && count >= 1 && count <= max_devices) return count;
  }
  throw std::invalid_argument("NCCLPY_HOST_DEVICES must be an integer from 1 to " + std::to_string(max_devices) +
                              ", not '" + text + "'");
}

// The primary context of a device is the address of its byte here; the bytes hold nothing.
char contexts[max_devices];
thread_local CUcontext current = nullptr;

std::atomic<bool> forked{false};
const int fork_watch = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

// FNV-1a.
std::uint64_t hash(const std::string& text) {
  std::uint64_t h = 0xcbf29ce484222325u;
  for (const unsigned char c : text) h = (h ^ c) * 0x100000001b3u;
  return h;
}

std::string machine_identity() {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  std::string boot;  // of the kernel: the same in all containers
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return std::string(host) + "/" + boot + "/" + std::to_string(getuid());
}

}  // namespace

int device_count() {
  static const int count = read_device_count();  // after an exception, the next call tries again
  return count;
}

CUcontext context_of(int device) {
  if (device < 0 || device >= device_count()) return nullptr;
  return reinterpret_cast<CUcontext>(contexts + device);
}

int device_of_context(CUcontext context) {
  const auto address = reinterpret_cast<std::uintptr_t>(context);
  const auto first = reinterpret_cast<std::uintptr_t>(contexts);
  if (address < first || address - first >= static_cast<std::uintptr_t>(device_count())) return -1;
  return static_cast<int>(address - first);
}

CUcontext current_context() { return current; }

void set_current_context(CUcontext context) { current = context; }

int current_device() { return current == nullptr ? 0 : device_of_context(current); }

std::string device_name(int device) { return "ncclpy host device " + std::to_string(device); }

CUuuid device_uuid(int device) {
  // never destroyed: threads may outlive static objects
  static const std::string& machine = *new std::string(machine_identity());
  const std::string name = machine + "/" + std::to_string(device);
  const std::uint64_t halves[2] = {hash("ncclpy/" + name), hash(name + "/uuid")};
  CUuuid uuid;
  std::memcpy(uuid.bytes, halves, sizeof uuid.bytes);
  uuid.bytes[6] = static_cast<char>((uuid.bytes[6] & 0x0f) | 0x80);  // version 8: vendor-specific
  uuid.bytes[8] = static_cast<char>((uuid.bytes[8] & 0x3f) | 0x80);  // the standard variant
  return uuid;
}

PciAddress device_pci_address(int device) { return {device / 255, device % 255 + 1, 0}; }

std::string device_pci_bus_id(int device) {
  const PciAddress address = device_pci_address(device);
  char text[32];
  std::snprintf(text, sizeof text, "%04X:%02X:%02X.0", address.domain, address.bus, address.device);
  return text;
}

bool after_fork() { return forked.load(std::memory_order_relaxed); }

}  // namespace ncclpy::host
