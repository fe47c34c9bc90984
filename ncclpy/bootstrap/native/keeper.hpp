// The keeper: the thread that serves the connections of a process on which no thread waits.
#pragma once

#include <memory>

namespace ncclpy::store {

class Client;

namespace keeper {

// Returns false where the thread, or what it needs, cannot be made.
bool add(const std::shared_ptr<Client>& client);
void remove(Client* client);

// Has the keeper ask the clients for their pace again, as one of them now needs ticks more often.
void look_again();

// Sets whether incoming bytes (`readable`) and room to send (`writable`) on a connection wake the keeper.
void watch(Client* client, bool readable, bool writable);

}  // namespace keeper
}  // namespace ncclpy::store
