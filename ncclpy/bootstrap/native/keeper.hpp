// The thread that looks after the connections of a process on which nobody waits.
#pragma once

#include <memory>

namespace ncclpy::store {

class Client;

namespace keeper {

// Returns false where the thread, or what it needs, cannot be made.
bool add(const std::shared_ptr<Client>& client);
void remove(Client* client);

// Has the thread look how often clients want to tick, as one has come to want it more often.
void look_again();

// Has the thread woken by what comes on the connection, or not; `writable`: by room for what is to be sent too.
void watch(Client* client, bool readable, bool writable);

}  // namespace keeper
}  // namespace ncclpy::store
