"""Random programs over the nodes of a tree with delayed frames, compared with a model of the expected records.

python node_runs.py SEED RUNS: ends with an error at the first seed that fails; prints the hits and the evictions of
the caches, and how many programs had joins, and process sets.
"""

from __future__ import annotations

import random
import sys

from ncclpy.coordinator.control import Node

NAMES = [b"a", b"b\0c", "grad/ä".encode(), b"d", b"", b"e"]


class Net:
    """Nodes, and the frames between them; each connection keeps the order of its frames."""

    def __init__(self, rng, size, fan, cache):
        self.rng, self.size = rng, size
        self.parents = [None, *((rank - 1) // fan for rank in range(1, size))]
        self.children = [[child for child in range(1, size) if self.parents[child] == rank] for rank in range(size)]
        self.nodes = [
            Node(rank, size, rank == 0, [(child, self.below(child)) for child in self.children[rank]], cache=cache)
            for rank in range(size)
        ]
        self.up, self.down = ([[] for _ in range(size)] for _ in "ud")
        self.records = [[] for _ in range(size)]

    def below(self, rank):
        return tuple(sorted([rank, *(each for child in self.children[rank] for each in self.below(child))]))

    def collect(self, rank):
        node = self.nodes[rank]
        self.up[rank] += node.up()
        frames = node.down()
        for child in self.children[rank]:
            self.down[child] += frames
        self.records[rank] += node.records()

    def deliver(self):
        """Deliver one frame; return whether there was one."""
        waiting = [(self.up, rank) for rank in range(self.size) if self.up[rank]]
        waiting += [(self.down, rank) for rank in range(self.size) if self.down[rank]]
        if not waiting:
            return False
        lines, rank = self.rng.choice(waiting)
        frame = lines[rank].pop(0)
        if lines is self.down:
            self.nodes[rank].from_parent(frame)
            self.collect(rank)
        else:
            parent = self.parents[rank]
            self.nodes[parent].from_child(self.children[parent].index(rank), frame)
            self.collect(parent)
        return True


class Program:
    """The operations that each rank brings in its own order, and the records that all must get."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.size = size = rng.randint(1, 9)
        self.net = Net(rng, size, rng.randint(1, 4), rng.choice([0, 1, 2, 3, 8]))
        self.names = rng.sample(NAMES, rng.randint(1, len(NAMES)))
        self.groups = {0: tuple(range(size))}
        self.wanted = [
            tuple(sorted(rng.sample(range(size), rng.randint(1, size)))) for _ in range(rng.choice([0, 0, 1, 3]))
        ]
        self.joins = rng.random() < 0.4
        self.rounds = [rng.randint(1, 6)] * size
        if self.joins:  # some ranks run out of data before others
            self.rounds = [rng.randint(1, 6) for _ in range(size)]
        self.at = [dict.fromkeys(self.names, 0) for _ in range(size)]
        self.flying = [set() for _ in range(size)]
        self.joined = [False] * size
        self.heard = [[] for _ in range(size)]
        self.owed = [[] for _ in range(size)]
        self.over = [None] * size
        self.plan = {}

    def brings(self, name, turn):
        """Return what each rank brings: mostly the same as before, sometimes something new, sometimes a mismatch."""
        if (name, turn) not in self.plan:
            rng, style = self.rng, self.rng.random()
            fixed = [b"A"] * self.size
            if style > 0.6:
                fixed = [b"B%d" % turn] * self.size
            if style > 0.8:
                fixed = [rng.choice([b"C", b"D"]) for _ in fixed]
            ragged = name in self.names[:2] and rng.random() < 0.3
            own = [b"%d" % rng.randint(0, 1) if ragged else b"" for _ in fixed]
            self.plan[name, turn] = fixed, own
        return self.plan[name, turn]

    def hear(self, rank):
        for frame in self.net.records[rank]:
            runs = set()
            for record in frame:
                self.heard[rank].append(record)
                kind = record[0]
                if kind in ("run", "mismatch", "after_join"):
                    self.flying[rank].discard(record[1:3])
                if kind == "run":
                    runs.add(record[1])
                if kind == "group":
                    self.groups[record[1]] = record[2]
                if kind == "ended":
                    self.over[rank] = record
            self.owed[rank] += runs
        self.net.records[rank].clear()

    def moves(self):
        """Return the possible moves of the ranks."""
        found = []
        for rank in range(self.size):
            if self.over[rank] or self.joined[rank]:
                continue
            rest = [name for name in self.names if self.at[rank][name] < self.rounds[rank]]
            found += [(self.bring, rank, name) for name in rest if (0, name) not in self.flying[rank]]
            if not rest and self.joins:
                found.append((self.join, rank))
        found += [(self.launch, rank) for rank in range(self.size) if self.owed[rank] and not self.over[rank]]
        return found

    def bring(self, rank, name):
        fixed, own = self.brings(name, self.at[rank][name])
        self.net.nodes[rank].bring(0, name, fixed[rank], own[rank])
        self.flying[rank].add((0, name))
        self.at[rank][name] += 1

    def join(self, rank):
        self.net.nodes[rank].join()
        self.joined[rank] = True

    def launch(self, rank):
        self.net.nodes[rank].launched(self.owed[rank].pop())

    def play(self):
        """Make possible moves in random order until none is left."""
        while True:
            moves = self.moves()
            if moves and self.rng.random() < 0.5:
                move, rank, *rest = self.rng.choice(moves)
                move(rank, *rest)
                self.net.collect(rank)
            elif not self.net.deliver() and not moves:
                return
            for rank in range(self.size):
                self.hear(rank)

    def settle(self):
        while self.net.deliver():
            pass
        for rank in range(self.size):
            self.hear(rank)

    def run(self):
        self.define()
        self.play()
        for rank in range(self.size):
            assert not self.net.nodes[rank].pending(), rank
        self.compare()
        self.in_sets()
        self.end()
        return [node.counters() for node in self.net.nodes]

    def define(self):
        for members in self.wanted:
            for rank in self.rng.sample(members, len(members)):
                self.net.nodes[rank].define(members)
                self.net.collect(rank)
            self.settle()
        assert sorted(self.groups.values()) == sorted([self.groups[0], *self.wanted])

    def compare(self):
        """Check that all ranks got the same records, with each operation as often and as predicted."""
        told = [[each for each in heard if each[0] != "group"] for heard in self.heard]
        assert all(each == told[0] for each in told)
        seen = dict.fromkeys(self.names, 0)
        for record in told[0]:
            if record[0] == "all_joined":
                continue
            name, turn = record[2], seen[record[2]]
            seen[name] += 1
            there = [rank for rank in range(self.size) if turn < self.rounds[rank]]
            fixed, own = self.plan[name, turn]
            if len({fixed[rank] for rank in there}) > 1:
                assert record[0] == "mismatch", record
                brought = {rank: part for part, ranks in record[3] for rank in ranks}
                assert brought == {rank: fixed[rank] for rank in there}
                continue
            absent = tuple(rank for rank in range(self.size) if rank not in there)
            assert record[0] == "run" and record[3] == fixed[there[0]] and record[5] == absent, record
            if not absent:
                assert record[4] == tuple(own), record
        assert seen == dict.fromkeys(self.names, max(self.rounds))
        if self.joins:
            assert sum(record[0] == "all_joined" for record in told[0]) == 1
            self.joined = [False] * self.size

    def in_sets(self):
        """Check that process sets run independently: a waiting set delays no other."""
        for number, members in self.groups.items():
            if number == 0:
                continue
            for rank in members:
                self.net.nodes[rank].bring(number, b"x", b"in a set", b"%d" % rank)
                self.net.collect(rank)
            before = [len(heard) for heard in self.heard]
            self.settle()
            for rank in range(self.size):
                fresh = self.heard[rank][before[rank] :]
                runs = ("run", number, b"x", b"in a set", tuple(b"%d" % each for each in members), ())
                assert fresh == ([runs] if rank in members else []), fresh

    def end(self):
        """End the session, with one reason on all ranks; a drain first runs the operations that all have brought."""
        rng, size = self.rng, self.size
        if size > 1 and rng.random() < 0.3:
            return self.lose(rng.randrange(1, size))
        drains, who = rng.random() < 0.6, rng.randrange(size)
        late = [rank for rank in range(size) if rng.random() < 0.5]
        for rank in range(size):
            self.net.nodes[rank].bring(0, b"all", b"A")
            if rank in late:
                self.net.nodes[rank].bring(0, b"some", b"A")
            self.net.collect(rank)
        self.net.nodes[who].shutdown(drains, b"why not")
        self.net.collect(who)
        goes_on = True
        while goes_on:
            goes_on = self.net.deliver()
            for rank in range(size):
                self.hear(rank)
                if self.owed[rank]:
                    goes_on = True
                    self.launch(rank)
                    self.net.collect(rank)
        for rank in range(size):
            assert self.over[rank] == ("ended", who, (), "why not")
            ran = {record[2] for record in self.heard[rank] if record[0] == "run" and record[1] == 0}
            if drains:
                assert b"all" in ran and (b"some" in ran) == (len(late) == size)
            assert not self.net.nodes[rank].pending()
            for call in (lambda rank=rank: self.net.nodes[rank].bring(0, b"late", b"A"), self.net.nodes[rank].join):
                try:
                    call()
                except Exception as error:
                    assert "ended" in str(error)
                else:
                    raise AssertionError("it has ended")

    def lose(self, lost):
        """Lose a rank: all others must name it; ranks above it hear by its parent, its children notice themselves."""
        net = self.net
        for rank in range(self.size):
            net.nodes[rank].bring(0, b"never", b"A") if rank != lost else None
            net.collect(rank)
        parent = net.parents[lost]
        net.nodes[parent].lost_child(net.children[parent].index(lost))
        net.collect(parent)
        for child in net.children[lost]:
            net.down[child].clear()
            net.nodes[child].lost_parent(lost)
            net.collect(child)
            net.up[child].clear()
        net.up[lost].clear()
        net.down[lost].clear()
        while net.deliver():
            net.down[lost].clear()
            for child in net.children[lost]:
                net.up[child].clear()
            for rank in range(self.size):
                self.hear(rank)
        for rank in range(self.size):
            self.hear(rank)
            assert rank == lost or self.over[rank] == ("ended", -1, (lost,), "has ended"), (rank, self.over[rank])


def main(seed, runs):
    hits = evicted = joins = sets = 0
    for each in range(seed, seed + runs):
        program = Program(each)
        try:
            counters = program.run()
        except BaseException:
            print(f"seed {each}", file=sys.stderr)
            raise
        hits += sum(counted["hits"] for counted in counters)
        evicted += sum(counted["evicted"] for counted in counters)
        joins += program.joins
        sets += bool(program.wanted)
    print(hits, evicted, joins, sets)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
