// The connection thread, one in a process: it sends the heartbeats of all store connections of the process, and reads
// from those on which no other thread waits.
#pragma once

#include <memory>

namespace ncclpy::store {

class Client;

namespace connection_thread {

// Has the connection thread serve a connection, until remove(). Returns false if the thread, or what it needs, cannot
// be made.
bool add(const std::shared_ptr<Client>& client);
void remove(Client* client);

// Has the connection thread ask all clients again for the interval between ticks, which has become shorter for one.
void update_tick_interval();

// Sets whether incoming bytes (`readable`) and space to send (`writable`) on a connection wake the connection thread.
void watch(Client* client, bool readable, bool writable);

}  // namespace connection_thread
}  // namespace ncclpy::store
