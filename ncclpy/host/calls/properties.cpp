// The properties of a communicator, and the teams of its ranks. All ranks share the memory of one machine, so they
// form one team of ranks that access each other by load and store; there is nothing for GPU kernels.
#include <cstring>

#include "call.hpp"
#include "launch/group.hpp"

namespace ncclpy::host {
namespace {

ncclResult_t properties(ncclComm_t handle, ncclCommProperties_t* out) {
  const char* const function = "ncclCommQueryProperties";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  NCCLPY_TRY(check_pointer(out, function, "props"));
  NCCLPY_TRY(comm->health.ensure_ready());
  ncclCommProperties_t all = {};
  constexpr size_t head = offsetof(ncclCommProperties_t, rank);
  std::memcpy(static_cast<void*>(&all), out, head);
  if (all.magic != NCCL_API_MAGIC || all.size < head) {
    return fail(ncclInvalidUsage,
                "Cannot get communicator properties: ncclCommProperties_t argument must be initialized via "
                "NCCL_COMM_PROPERTIES_INITIALIZER");
  }
  all.rank = comm->rank;
  all.nRanks = comm->nranks;
  all.cudaDev = all.nvmlDev = comm->device;
  all.nLsaTeams = 1;
  all.hostRmaSupport = true;
  all.ginType = all.railedGinType = NCCL_GIN_TYPE_NONE;
  all.ginConnectionType = NCCL_GIN_CONNECTION_NONE;
  std::memcpy(&all.commHash, comm->segment->header().nonce, sizeof all.commHash);
  // The caller's struct may be that of an older release, and shorter.
  std::memcpy(static_cast<void*>(out), &all, all.size < sizeof all ? all.size : sizeof all);
  return ncclSuccess;
}

// The team functions return no result code: for an invalid communicator they return an empty team and set
// ncclGetLastError's text.
template <class Team>
ncclTeam_t team_of(ncclComm_t handle, const char* function, Team team) {
  ncclTeam_t made = {};
  guarded(function, [&] {
    std::shared_ptr<Comm> comm;
    NCCLPY_TRY(find_comm(handle, function, &comm));
    NCCLPY_TRY(comm->health.ensure_ready());
    made = team(*comm);
    return ncclSuccess;
  });
  return made;
}

ncclTeam_t world_team(const Comm& comm) { return {comm.nranks, comm.rank, 1}; }

ncclTeam_t single_team(const Comm&) { return {1, 0, 1}; }

// Converts a rank of a team to a rank of the communicator; -1 after an error. A team consists of every stride-th rank
// of the communicator; the caller is its member `team.rank`.
int rank_in_world(ncclComm_t handle, const char* function, ncclTeam_t team, int rank) {
  int found = -1;
  guarded(function, [&] {
    std::shared_ptr<Comm> comm;
    NCCLPY_TRY(find_comm(handle, function, &comm));
    found = comm->rank + (rank - team.rank) * team.stride;
    return ncclSuccess;
  });
  return found;
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t* out) {
  return guarded("ncclCommQueryProperties", [&] { return properties(comm, out); });
}

ncclTeam_t ncclTeamWorld(ncclComm_t comm) { return team_of(comm, "ncclTeamWorld", world_team); }

ncclTeam_t ncclTeamLsa(ncclComm_t comm) { return team_of(comm, "ncclTeamLsa", world_team); }

ncclTeam_t ncclTeamRail(ncclComm_t comm) {
  return team_of(comm, "ncclTeamRail", [](const Comm& c) { return ncclTeam_t{1, 0, c.nranks}; });
}

ncclTeam_t ncclTeamCft(ncclComm_t comm, ncclCftTeamMode_t) { return team_of(comm, "ncclTeamCft", single_team); }

ncclTeam_t ncclTeamCftMultimem(ncclComm_t comm) { return team_of(comm, "ncclTeamCftMultimem", single_team); }

int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) {
  return rank_in_world(comm, "ncclTeamRankToWorld", team, rank);
}

// The team for load and store (LSA) consists of all ranks.
int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) {
  return rank_in_world(comm, "ncclTeamRankToLsa", team, rank);
}
