// The virtual devices of the host engine: how many, what they are called, and which is current.
#pragma once

#include <string>

#include "driver_abi.h"

namespace ncclpy::host {

// The number of devices: NCCLPY_HOST_DEVICES, 8 unless set. Throws std::invalid_argument, with a message for people,
// if the variable is not an integer from 1 to 1024.
int device_count();

// A device's primary context, the only one it has; nullptr if there is no such device.
CUcontext context_of(int device);
// The device of a context, or -1 if it is not one of ours.
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

// Whether this process is a fork of one that used the engine: its streams have lost their threads.
bool after_fork();

}  // namespace ncclpy::host
