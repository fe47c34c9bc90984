// The virtual devices of the host engine: their number, their identity, and the current device.
#pragma once

#include <string>

#include "driver_abi.h"

namespace ncclpy::host {

// The number of devices: NCCLPY_HOST_DEVICES, 8 unless set. Throws std::invalid_argument, with a message for users, if
// the variable is not an integer from 1 to 1024.
int device_count();

// The primary context of a device, its only one; nullptr if there is no such device.
CUcontext context_of(int device);
// The device of a context, or -1 if the context is not the engine's.
int device_of_context(CUcontext context);

// The calling thread's current context; nullptr if none was set.
CUcontext current_context();
void set_current_context(CUcontext context);
// The device of the current context; 0 if there is none.
int current_device();

std::string device_name(int device);
CUuuid device_uuid(int device);
std::string device_pci_bus_id(int device);  // domain:bus:device.function
struct PciAddress {
  int domain, bus, device;
};
PciAddress device_pci_address(int device);

// Whether this process was forked after the engine was loaded: the threads of its streams do not exist here.
bool after_fork();

}  // namespace ncclpy::host
