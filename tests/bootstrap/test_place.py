"""`environment`: the place of this process, by launchers' variables; test_launchers.py starts real launchers."""

import os
import re

import pytest

from ncclpy.bootstrap import Place, environment

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]",
}  # fmt: skip
NCCLPY = TORCHRUN | {
    "TORCHELASTIC_RUN_ID": "abc", "NCCLPY_RUN_ID": "outer/abc", "NCCLPY_STORE": "10.0.0.1:4711",
}  # fmt: skip


@pytest.fixture
def env(monkeypatch):
    """Return a function that sets launchers' variables to exactly the given ones."""

    def make(*parts):
        for name in list(os.environ):
            if re.match(
                r"(.*RANK|.*WORLD_SIZE|OMPI_|PMI|MPI_|SLURM_|MASTER_|TORCHELASTIC_|NCCLPY_(STORE|RUN|LAU))", name
            ):
                monkeypatch.delenv(name)
        for part in parts:
            for name, value in part.items():
                monkeypatch.setenv(name, value)

    return make


@pytest.mark.parametrize(
    ("variables", "rest"),
    [
        (TORCHRUN, ("torchrun", "node0", 29500)),
        (NCCLPY, ("ncclpy", "10.0.0.1", 4711)),
        (NCCLPY | {"NCCLPY_STORE": "[::1]:4711"}, ("ncclpy", "::1", 4711)),
        (OPENMPI, ("openmpi", None, None)),
        (MPICH, ("mpich", None, None)),
        (MPICH | {"MASTER_ADDR": "::1", "MASTER_PORT": "1"}, ("mpich", "::1", 1)),
        (SLURM, ("slurm", None, None)),
        (SLURM | {"SLURM_STEP_RESV_PORTS": "12000-12003"}, ("slurm", "gpu03", 12000)),
        (SLURM | {"SLURM_STEP_RESV_PORTS": "12007", "SLURM_STEP_NODELIST": "n1,n2"}, ("slurm", "n1", 12007)),
    ],
)
def test_each_launcher_is_read(env, variables, rest):
    env(variables)
    assert environment() == Place(5, 8, 1, 4, *rest)


@pytest.mark.parametrize(
    ("tasks", "node", "count"), [("3", 0, 3), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4,2,3(x2)", 1, 2)]
)
def test_slurm_local_size_follows_task_list(env, tasks, node, count):
    env(SLURM, {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"})
    assert environment().local_size == count


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        # Variables of an outer launcher stay set: srun starts Open MPI's daemons, mpirun a torchrun on each machine.
        (OPENMPI | SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "openmpi"),
        (MPICH | SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "mpich"),
        (TORCHRUN | OPENMPI | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "torchrun"),
        (TORCHRUN | SLURM | {"SLURM_PROCID": "1"}, "torchrun"),
        # torchrun under ncclpy run: leftovers of the outer launcher do not count.
        (NCCLPY | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        # srun --mpi=pmi2 speaks PMI as well.
        ({"PMI_RANK": "5", "PMI_SIZE": "8"} | SLURM, "slurm"),
        # A script has set all or some of torchrun's variables from the launcher's.
        ({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | OPENMPI, "openmpi"),
        ({"LOCAL_RANK": "1"} | SLURM, "slurm"),
        # By hand, with all variables of torchrun.
        ({name: TORCHRUN[name] for name in TORCHRUN if name[:5] != "TORCH"}, "torchrun"),
    ],
)
def test_innermost_of_several_launchers_counts(env, variables, launcher):
    env(variables)
    place = environment()
    assert place.launcher == launcher and place[:4] == (5, 8, 1, 4)


@pytest.mark.parametrize("variables", [TORCHRUN, OPENMPI, MPICH, SLURM], ids=["torchrun", "openmpi", "mpich", "slurm"])
def test_incomplete_environment_names_set_and_missing_variables(env, variables):
    numbers = [name for name in variables if re.search("RANK|SIZE|PROCID|LOCALID|TASKS", name)]
    assert len(numbers) == 4
    for absent in numbers[:2] if variables is TORCHRUN else numbers:
        env({name: value for name, value in variables.items() if name != absent})
        with pytest.raises(ValueError, match="half-set") as error:
            environment()
        there, _, missing = str(error.value).partition(" but no ")
        assert missing == absent
        assert all(f"{name}={variables[name]}" in there for name in numbers if name != absent)


@pytest.mark.parametrize(
    ("local", "found"),
    [
        ({}, (None, None)),
        ({"LOCAL_RANK": "1"}, (1, None)),
        ({"LOCAL_WORLD_SIZE": "4"}, (None, 4)),
    ],
)
def test_rank_and_world_size_are_complete_without_local_numbers(env, local, found):
    """Kubeflow's PyTorchJob, and scripts for torch's env://, set only these."""
    env({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")} | local)
    assert environment() == Place(5, 8, *found, "torchrun", "node0", 29500)


def test_one_rank_is_alone_on_its_machine(env):
    env({"RANK": "0", "WORLD_SIZE": "1"})
    assert environment() == Place(0, 1, 0, 1, "torchrun")


@pytest.mark.parametrize("blank", [" ", "\t", "\n", "\xa0"])
@pytest.mark.parametrize(
    ("variables", "rest"),
    [
        (TORCHRUN, ("torchrun", "node0", 29500)),
        (NCCLPY, ("ncclpy", "10.0.0.1", 4711)),
        (MPICH | {"NCCLPY_LAUNCHER": "mpich"}, ("mpich", None, None)),
        (SLURM | {"SLURM_STEP_RESV_PORTS": "12000-12003"}, ("slurm", "gpu03", 12000)),
    ],
)
def test_white_space_around_values_is_ignored(env, variables, rest, blank):
    env({name: f"{blank}{value}{blank}" for name, value in variables.items()})
    assert environment() == Place(5, 8, 1, 4, *rest)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK=8, WORLD_SIZE=8.* rank is 8, and must be from 0 to 7"),
        (TORCHRUN | {"RANK": "-1"}, "rank is -1, and must be from 0 to 7"),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "OMPI_COMM_WORLD_LOCAL_RANK=4.* 4, and must be from 0 to 3"),
        (MPICH | {"MPI_LOCALNRANKS": "9"}, "MPI_LOCALNRANKS=9: the number of ranks .* 9, and must be from 1 to 8"),
        (SLURM | {"SLURM_NODEID": "2"}, r"SLURM_NODEID=2 is out of range: SLURM_\w+=4\(x2\) lists 2 nodes"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(y"}, r"SLURM_STEP_TASKS_PER_NODE=4\(y is not a list"),
        (TORCHRUN | {"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": ""}, "local rank is 8, and must be from 0 to 7"),
        (MPICH | {"PMI_RANK": "one"}, "^PMI_RANK=one is not a number$"),
        # Invisible characters are shown escaped, as by Python's repr().
        (MPICH | {"PMI_RANK": "1 2"}, "^PMI_RANK='1 2' is not a number$"),
        (TORCHRUN | {"MASTER_PORT": "29500\u200b"}, r"^MASTER_PORT='29500\\u200b' has no port"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "^MASTER_PORT=0 has no port"),
        (TORCHRUN | {"MASTER_PORT": ""}, "^the address to meet at is half-set: MASTER_ADDR=node0 but no MASTER_PORT$"),
        (MPICH | {"MASTER_PORT": "1"}, "MASTER_PORT=1 but no MASTER_ADDR$"),
        (
            TORCHRUN | {"MASTER_ADDR": "node0:29500"},
            "^MASTER_ADDR: .*got 'node0:29500' with a port; write 'node0' here",
        ),
        (NCCLPY | {"NCCLPY_STORE": ""}, "NCCLPY_RUN_ID=outer/abc but no NCCLPY_STORE"),
        (TORCHRUN | {"NCCLPY_LAUNCHER": "pbs"}, "^NCCLPY_LAUNCHER=pbs is not one of torchrun, openmpi, mpich, slurm$"),
        # Leftovers in the shell that started mpirun: all ranks would be rank 0 of 1.
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"} | OPENMPI,
            "OMPI_COMM_WORLD_RANK=5 but RANK=0; OMPI_COMM_WORLD_SIZE=8 but WORLD_SIZE=1"
            ".*NCCLPY_LAUNCHER, which may be openmpi or torchrun",
        ),
        ({"WORLD_SIZE": "4"} | SLURM, "SLURM_STEP_NUM_TASKS=8 but WORLD_SIZE=4"),
        (OPENMPI | MPICH | {"PMI_RANK": "2"}, "OMPI_COMM_WORLD_RANK=5 but PMI_RANK=2"),
    ],
)
def test_contradictory_environment_names_variables_and_values(env, variables, message):
    env(variables)
    with pytest.raises(ValueError, match=message):
        environment()


def test_launcher_can_be_chosen(env):
    left_over = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env(left_over | OPENMPI | {"NCCLPY_LAUNCHER": "openmpi"})
    assert environment().rank == 5
    env(left_over | OPENMPI | {"NCCLPY_LAUNCHER": "torchrun"})
    assert environment() == Place(0, 1, 0, 1, "torchrun")
    env(left_over | OPENMPI | {"NCCLPY_LAUNCHER": "slurm"})
    with pytest.raises(ValueError, match="the environment of slurm is half-set: nothing but no SLURM_PROCID"):
        environment()


def test_without_a_launcher_the_error_says_how_to_start(env):
    env()
    with pytest.raises(RuntimeError, match=r"no launcher has started this process.*ncclpy run -n N"):
        environment()
    # The shell of an allocation has Slurm's variables, but is no task.
    env({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"})
    with pytest.raises(RuntimeError, match="the shell of Slurm's job 7: srun starts"):
        environment()
