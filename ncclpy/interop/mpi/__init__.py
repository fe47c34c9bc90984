"""mpi4py: rendezvous, a store, and a coordinator whose data MPI carries."""
