"""mpi4py: rendezvous, a store, and a coordinator with MPI as its data plane."""
