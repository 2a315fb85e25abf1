"""The actions that each worker runs, in order.

A pipeline is usually written as loops that mix order, transfers and computation, so its order can
be neither printed nor proved free of deadlock. Here the order is a value: a :class:`Schedule` has
one row of actions for each worker, prints as a table, and is the object that workers run.

An action is forward (F), recompute (R) or backward (B) of micro-batch i on stage j, or that part of
a backward for which nobody waits, the gradients of the weights (W). Transfers are not actions: an
action's needs follow from the action alone, so a table stays short enough to check by eye::

    stage 0 | F0 F1 F2 .  .  B2 B1 B0
    stage 1 | .  F0 F1 F2 B2 B1 B0 .

A schedule has phases, between which the caller's code runs. GPipe's has two: the user's code
computes the loss on the whole mini-batch, so no backward starts before the last forward has ended.
Where each micro-batch has a loss of its own, forwards and backwards may alternate in one phase.
Then the caller has a row too: its code up to the call of the pipeline (P), from there to the loss
and through the loss's backward (L), and backward through the code before the call (B)::

    stage 0 | F0 F1 .  B0 F2 B1 .  B2
    stage 1 | .  F0 B0 F1 B1 F2 B2 .
    caller  | P0 P1 L0 P2 L1 L2 B0 B1 B2

If several modules are a chain, here of a stage each, its code between two of them is a P, too, and
the backward through it a C::

    stage 0 | F0 F1 .  B0 F2 B1 .  B2
    stage 1 | .  F0 B0 F1 B1 F2 B2 .
    caller  | P0 P1 P0 L0 P1 C0 P2 L1 C1 P2 B0 L2 C2 B1 B2

Where the gradients of a stage do not stay in its process, as with replicas, they go home once they
are complete, after its last backward (G), beside what is left of the schedule::

    stage 0 | F0 F1 .  B0 F2 B1 .  B2 G2
    stage 1 | .  F0 B0 F1 B1 F2 B2 G2 .
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby

from lightning_gpipe.core.schedules.action import Action, Kind, Row, predecessors, successor


@dataclass(frozen=True)
class Simulation:
    """The result of simulating a schedule.

    Attributes:
        start: The start of each action, in units of cost; those of one worker in their order.
        end: The end of each action.
        makespan: The end of the last action.
        bubble: The share of the workers' time in which they are idle; the caller's does not count.
    """

    start: dict[Action, float]
    end: dict[Action, float]
    makespan: float
    bubble: float


def _one(action: Action) -> float:
    """Return the cost 1 for an action that computes on a stage, and 0 for others."""
    return 0.0 if action.by_caller else float(action.kind.cycles)


def _with_gradients(row: Row) -> Iterator[Action]:
    last = {a.j: a for a in row if a.kind in (Kind.BACKWARD, Kind.WEIGHTS)}
    for action in row:
        yield action
        if last.get(action.j) == action:
            yield action._replace(kind=Kind.GRADIENTS)


@dataclass(frozen=True)
class Schedule:
    """The actions of one mini-batch: a row for each worker, in order.

    Attributes:
        m: The number of micro-batches.
        placement: The worker of each stage.
        phases: For each phase, one row of actions per worker. A phase starts when the caller has
            all results of the previous phase.
        caller: The actions of the caller while the only phase runs, in order; empty if its code
            runs before, between and after the phases.
        whole: The schedule with all actions of the caller, if those here are only some of them.
    """

    m: int
    placement: tuple[int, ...]
    phases: tuple[tuple[Row, ...], ...]
    caller: Row = ()
    whole: Schedule | None = None

    @property
    def n(self) -> int:
        return len(self.placement)

    @property
    def workers(self) -> int:
        """The number of workers; as an index it stands for the caller."""
        return len(self.phases[0])

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(tuple(chain(*parts)) for parts in zip(*self.phases, strict=True))

    def phase(self, k: int) -> Schedule:
        return self._phases[k]

    def phase_of(self, action: Action) -> int:
        return self._phase_of[action]

    def recomputed(self, j: int) -> frozenset[int]:
        return self._recomputed[j]

    @cached_property
    def with_gradients(self) -> Schedule:
        """Return the schedule in which each stage's gradients go home after its last backward."""
        phases = (tuple(tuple(_with_gradients(row)) for row in rows) for rows in self.phases)
        return replace(self, phases=tuple(phases))

    def order_of(self, kind: Kind, j: int) -> list[int]:
        """The micro-batches in the order of their actions of a kind on stage ``j``."""
        row = self.rows[self.placement[j]]
        return [action.i for action in row if action.kind is kind and action.j == j]

    @cached_property
    def forwards(self) -> bool:
        return any(action.kind is Kind.FORWARD for row in self.rows for action in row)

    @cached_property
    def last_backwards(self) -> Row:
        """The backwards of the first stage, in order; the caller gets their results."""
        return tuple(Action(Kind.BACKWARD, i, 0) for i in self.order_of(Kind.BACKWARD, 0))

    @cached_property
    def last_result(self) -> Action:
        """The result for the caller that ends the schedule, when all else has been sent."""
        if self.last_backwards:
            return successor(self.last_backwards[-1])
        return Action(Kind.FORWARD, self.order_of(Kind.FORWARD, self.n - 1)[-1], self.n)

    def caller_of(self, kinds: frozenset[Kind]) -> Schedule:
        """Return the schedule of a process whose caller runs only some kinds of actions."""
        if kinds not in self._callers:
            own = tuple(action for action in self.caller if action.kind in kinds)
            self._callers[kinds] = replace(self, caller=own, whole=self)
        return self._callers[kinds]

    @cached_property
    def split(self) -> bool:
        """True if the gradients of the weights are actions of their own."""
        return any(action.kind is Kind.WEIGHTS for row in self.rows for action in row)

    def needs(self, action: Action) -> Iterator[Action]:
        """Yield the actions that must have ended before ``action`` starts.

        They are those of its kind, and the results of the previous phase. Some may be in no row.
        """
        yield from predecessors(action)
        yield from self._results_before.get(action, ())

    def simulate(self, cost: Callable[[Action], float] = _one) -> Simulation:
        """Simulate the schedule, with the duration of each action, in any unit.

        Each worker runs its actions in order, each after those that it needs.

        Raises:
            RuntimeError: If the workers wait for one another.
        """
        start: dict[Action, float] = {}
        end: dict[Action, float] = {}
        everyone = [*self.rows, self.caller]
        clock = [0.0] * len(everyone)
        waiting = [list(reversed(row)) for row in everyone]
        present = {action for row in everyone for action in row}

        progress = True
        while progress:
            progress = False
            for worker, queue in enumerate(waiting):
                while queue:
                    needed = [action for action in self.needs(queue[-1]) if action in present]
                    if not all(action in end for action in needed):
                        break
                    action = queue.pop()
                    start[action] = max([clock[worker], *(end[need] for need in needed)])
                    clock[worker] = end[action] = start[action] + cost(action)
                    progress = True
        if any(waiting):
            stuck = ", ".join(self._place(queue[-1]) for queue in waiting if queue)
            raise RuntimeError(f"the schedule must end, but its workers deadlock: {stuck}")

        makespan = max(clock)
        busy = sum(end[action] - start[action] for row in self.rows for action in row)
        bubble = 1.0 - busy / (makespan * self.workers) if makespan else 0.0
        return Simulation(start, end, makespan, bubble)

    def _place(self, action: Action) -> str:
        worker = self.worker_of(action)
        if worker == self.workers:
            return f"the caller at {action}"
        return f"worker {worker} at {action} on stage {action.j}"

    @cached_property
    def simulation(self) -> Simulation:
        """The simulation in which actions on stages take one unit, and the caller's no time."""
        return self.simulate()

    @property
    def bubble(self) -> float:
        """The share of the workers' idle time, if actions on stages take equally long."""
        return self.simulation.bubble

    @cached_property
    def at_work(self) -> dict[Action, int]:
        """For each action, the most workers that are at work at once while it runs.

        A whole backward takes two clock cycles here, as it computes twice as much as a forward.
        """
        twice = () if self.split else (Kind.BACKWARD,)
        simulation = self.simulate(lambda a: _one(a) * (2 if a.kind in twice else 1))
        cycles = {
            action: range(int(start), int(simulation.end[action]))
            for action, start in simulation.start.items()
        }
        workers = Counter(chain.from_iterable(cycles.values()))
        return {
            action: max((workers[cycle] for cycle in own), default=self.workers)
            for action, own in cycles.items()
        }

    @cached_property
    def interleaved(self) -> Row:
        """The actions in a sequence that a single thread can run, clock cycle by clock cycle."""
        start, end = self.simulation.start, self.simulation.end
        # Actions that take no time come first: others that start then may need them.
        return tuple(sorted(start, key=lambda a: (start[a], end[a], self.worker_of(a))))

    def turns_of(self, workers: tuple[int, ...]) -> Sequence[tuple[int, Row]]:
        """Return the sequence in which one thread runs some workers and the caller.

        For each turn it has the worker, :attr:`workers` for the caller, and its actions. The
        caller's actions come as late as can be: in a process without the last stage, a loss waits
        for an output, and with it would the next forward here. A call, in which processes may
        compute together, has the place of the first stage's forward in all of them.
        """
        if workers not in self._turns:
            groups = groupby(self._sequence_of(workers), self.worker_of)
            self._turns[workers] = [(worker, tuple(row)) for worker, row in groups]
        return self._turns[workers]

    @cached_property
    def turns_by_stage(self) -> Sequence[tuple[int, Row]]:
        """The turns in which one thread runs all backwards of a stage, then those before it.

        Empty if the phase has other actions too, or does not begin with the last micro-batch:
        autograd, which may be given all backwards of a turn at once, begins with the latest graph.
        """
        turns = []
        for j, worker in reversed([*enumerate(self.placement)]):
            row = tuple(action for action in self.rows[worker] if action.j == j)
            if row != tuple(Action(Kind.BACKWARD, i, j) for i in reversed(range(self.m))):
                return ()
            turns.append((worker, row))
        return () if self.caller else turns

    def _sequence_of(self, workers: tuple[int, ...]) -> Iterator[Action]:
        if self.whole is not None:  # calls have the same place in all processes
            others = {*self.whole.caller}.difference(self.caller)
            yield from (a for a in self.whole._sequence_of(workers) if a not in others)
            return
        ends = {action: k + 1 for k, action in enumerate(self.caller)}
        calls = {action.j for action in self.caller if action.kind is Kind.PREPARE}
        begun = 0
        for action in self.interleaved:
            own, end = self.worker_of(action) in workers, 0
            if action.kind is Kind.FORWARD:
                end = ends.get(Action(Kind.PREPARE, action.i, action.j - 1), 0)
            elif action.kind is Kind.BACKWARD and own and not action.by_caller:
                later = min((j for j in calls if j >= action.j), default=self.n)
                kind = Kind.LOSS if later == self.n else Kind.CODE
                end = ends.get(Action(kind, action.i, later), 0)
            yield from self.caller[begun:end]
            begun = max(begun, end)
            if own:
                yield action
        yield from self.caller[begun:]

    def worker_of(self, action: Action) -> int:
        """The worker that runs an action; :attr:`workers` stands for the caller."""
        if action.by_caller or not 0 <= action.j < self.n:
            return self.workers
        return self.placement[action.j]

    def __str__(self) -> str:
        """Return a line for each stage, a column for each clock cycle, and the caller's actions."""
        start = self.simulation.start
        own = [round(cycle) + 1 for action, cycle in start.items() if not action.by_caller]
        cycles = max(own, default=0)
        width = max((len(str(action)) for action in start), default=1)
        lines = []
        for j, worker in enumerate(self.placement):
            cells = ["."] * cycles
            for action, cycle in start.items():
                if action.j == j and not action.by_caller:
                    cells[round(cycle)] = str(action)
            owner = f" (worker {worker})" if self.workers < self.n else ""
            row = " ".join(cell.ljust(width) for cell in cells)
            lines.append(f"stage {j}{owner} | {row}".rstrip())
        if self.caller:
            title = "caller".ljust(lines[-1].index(" |"))
            lines.append(f"{title} | {' '.join(map(str, self.caller))}")
        return "\n".join(lines) + "\n"

    @cached_property
    def _phases(self) -> tuple[Schedule, ...]:
        return tuple(replace(self, phases=(rows,)) for rows in self.phases)

    @cached_property
    def _turns(self) -> dict[tuple[int, ...], Sequence[tuple[int, Row]]]:
        return {}

    @cached_property
    def _callers(self) -> dict[frozenset[Kind], Schedule]:
        return {}

    @cached_property
    def recomputes(self) -> bool:
        return any(self._recomputed)

    @cached_property
    def _recomputed(self) -> list[frozenset[int]]:
        return [frozenset(self.order_of(Kind.RECOMPUTE, j)) for j in range(self.n)]

    @cached_property
    def _phase_of(self) -> dict[Action, int]:
        phases = enumerate((*rows, self.caller) for rows in self.phases)
        return {action: k for k, rows in phases for row in rows for action in row}

    @cached_property
    def _results_before(self) -> dict[Action, tuple[Action, ...]]:
        """For each action, the actions of the previous phase whose results the caller needs."""
        needed: dict[Action, tuple[Action, ...]] = {}
        results: tuple[Action, ...] = ()
        for rows in self.phases:
            actions = tuple(chain(*rows))
            needed |= dict.fromkeys(actions, results)
            results = tuple(a for a in actions if not 0 <= a.j + a.kind.direction < self.n)
        return needed
