"""A graph pipeline in one file of plain torch: the idea of this project, to read in one sitting.

A model with branches is a graph of blocks. Other pipelines are chains: stages in a line, each of which works for the next one. With
three towers and four devices the line is four stages deep, and towers that know nothing of each other wait for each other:

    chain:   [1st third of the towers] ──► [2nd third] ──► [3rd third] ──► [joined]           four micro-batches in flight

A graph pipeline keeps the towers beside each other. Fewer stages lie between a stage and the loss, so the pipeline fills and drains
sooner, and fewer micro-batches are in flight:

    graph:   [vision] ──┐
             [text]   ──┼──► [joined]                                                          two micro-batches in flight
             [audio]  ──┘

The file has five parts: the model as a graph (1), how it is cut into stages (2), the order in which a stage works (3), the time
that a step takes (4), and the processes that run it with torch.distributed (5). The losses equal those of one process.

    python examples/tiny_gpp.py --devices 4 --steps 5
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

# --- 1. The model: blocks, and whose outputs each of them reads --------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A module, and the names of what it reads: blocks before it, or fields of the batch."""

    name: str
    module: nn.Module
    reads: tuple[str, ...]


class Layer(nn.Module):
    """A residual layer: [samples, width] -> [samples, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Join(nn.Module):
    """The towers, joined: one [samples, width] of each -> [samples, width]."""

    def __init__(self, width: int, towers: int) -> None:
        super().__init__()
        self.mix = nn.Linear(towers * width, width)

    def forward(self, *towers: Tensor) -> Tensor:
        return torch.relu(self.mix(torch.cat(towers, dim=1)))


class Head(nn.Module):
    """The loss of a micro-batch: the mean over its samples, a scalar."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.classify(x), labels)


TOWERS = ("vision", "text", "audio")
"""Each tower reads the field of the batch that has its name."""


def make_model(width: int = 32, depth: int = 2, classes: int = 10) -> list[Block]:
    """Towers and a joined part, each block behind what it reads. Everybody who calls this has equal weights."""
    torch.manual_seed(0)
    blocks = list[Block]()

    def tower(name: str, reads: str) -> str:
        for i in range(depth):
            blocks.append(Block(f"{name}.{i}", Layer(width), (reads,)))
            reads = blocks[-1].name
        return reads

    ends = tuple(tower(name, name) for name in TOWERS)
    blocks.append(Block("join", Join(width, len(TOWERS)), ends))
    blocks.append(Block("head", Head(width, classes), (tower("joined", "join"), "labels")))
    return blocks


def make_batch(step: int, samples: int, width: int = 32, classes: int = 10) -> dict[str, Tensor]:
    """The mini-batch of a step, the same in every process."""
    draw = torch.Generator().manual_seed(1000 + step)
    fields = {name: torch.randn(samples, width, generator=draw) for name in TOWERS}
    return {**fields, "labels": torch.randint(classes, (samples,), generator=draw)}


def run_blocks(blocks: list[Block], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values with the outputs of the blocks added."""
    for block in blocks:
        values[block.name] = block.module(*(values[name] for name in block.reads))
    return values


# --- 2. The cut: which blocks form a stage -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageGraph:
    """Stages and their edges. Stage s runs on device s.

    Args:
        of: block -> its stage.
        edges: (block, stage): the stage reads the output of the block, which another stage makes. A tensor is sent once to a stage,
            however many of its blocks read it.
    """

    of: dict[str, int]
    edges: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return max(self.of.values()) + 1

    def before(self, s: int) -> set[int]:
        return {self.of[block] for block, reader in self.edges if reader == s}

    def after(self, s: int) -> set[int]:
        return {reader for block, reader in self.edges if self.of[block] == s}

    def distance(self, s: int) -> int:
        """Stages on the longest way from a stage to the loss, itself included. It says how many micro-batches are in flight."""
        return 1 + max((self.distance(t) for t in self.after(s)), default=0)


def stage_graph(blocks: list[Block], of: Mapping[str, int]) -> StageGraph | None:
    """The graph of a cut; None if two stages wait for each other."""
    edges = {(name, of[block.name]) for block in blocks for name in block.reads if of.get(name, of[block.name]) != of[block.name]}
    waits = {s: {of[name] for name, reader in edges if reader == s} for s in set(of.values())}
    done = set[int]()
    while len(done) < len(waits):
        ready = {s for s in waits if s not in done and waits[s] <= done}
        if not ready:
            return None
        done |= ready
    return StageGraph(dict(of), tuple(sorted(edges)))


def every_cut(blocks: list[Block], most: int) -> Iterator[StageGraph]:
    """All stage graphs with at most so many stages. A real planner cannot try them all; this model is small."""

    def grow(i: int, of: dict[str, int]) -> Iterator[dict[str, int]]:
        if i == len(blocks):
            yield of
            return
        stages = max(of.values(), default=-1) + 1
        for s in range(min(stages + 1, most)):
            yield from grow(i + 1, {**of, blocks[i].name: s})

    for of in grow(0, {}):
        found = stage_graph(blocks, of)
        if found is not None:
            yield found


def is_chain(graph: StageGraph) -> bool:
    """Whether the stages stand in a line, as in other pipelines."""
    return all(len(graph.before(s)) <= 1 and len(graph.after(s)) <= 1 for s in range(graph.size))


# --- 3. The schedule: the order in which a stage works ------------------------------------------------------------------------


def schedule(graph: StageGraph, s: int, microbatches: int) -> list[tuple[str, int]]:
    """One forward, one backward (1F1B): as many forwards as the stage is far from the loss, then a backward and a forward by turns.

    A micro-batch is in flight from its forward to its backward, so no stage keeps more than `distance` of them:

        distance 2, four micro-batches:   F0 F1 B0 F2 B1 F3 B2 B3
    """
    ahead = min(graph.distance(s), microbatches)
    order = [("F", m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(("B", m))
        if ahead + m < microbatches:
            order.append(("F", ahead + m))
    return order


# --- 4. The prediction: what a step takes --------------------------------------------------------------------------------------


def measure(blocks: list[Block], microbatch: dict[str, Tensor], repeats: int = 5) -> dict[str, tuple[float, float]]:
    """Seconds of a forward and of a backward of every block, on one micro-batch: the fastest of some repeats."""
    took: dict[str, list[tuple[float, float]]] = {block.name: [] for block in blocks}
    for _ in range(repeats):
        values = dict(microbatch)
        for block in blocks:
            inputs = [values[name].detach().requires_grad_(values[name].is_floating_point()) for name in block.reads]
            start = time.perf_counter()
            out = block.module(*inputs)
            middle = time.perf_counter()
            out.backward(torch.ones_like(out))
            took[block.name].append((middle - start, time.perf_counter() - middle))
            values[block.name] = out
    for block in blocks:
        block.module.zero_grad()
    return {name: (min(f for f, _ in each), min(b for _, b in each)) for name, each in took.items()}


def predict(graph: StageGraph, seconds: Mapping[str, tuple[float, float]], microbatches: int) -> float:
    """Seconds of a step: the longest path through the passes. Messages are taken to be free.

    A pass waits for the pass before it on its device, and for the messages that it reads: a forward for those of the stages
    before, a backward for those of the stages behind.
    """
    time_of = {s: tuple(sum(seconds[n][w] for n, own in graph.of.items() if own == s) for w in (0, 1)) for s in range(graph.size)}
    orders = {s: schedule(graph, s, microbatches) for s in range(graph.size)}
    end: dict[tuple[int, str, int], float] = {}
    place, clock = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0.0)
    while any(place[s] < len(orders[s]) for s in orders):
        for s, order in orders.items():
            while place[s] < len(order):
                kind, m = order[place[s]]
                needs = [(t, kind, m) for t in (graph.before(s) if kind == "F" else graph.after(s))]
                if any(need not in end for need in needs):
                    break
                clock[s] = max([clock[s], *(end[need] for need in needs)]) + time_of[s][kind == "B"]
                end[s, kind, m] = clock[s]
                place[s] += 1
    return max(clock.values())


# --- 5. The run: one process for each stage ------------------------------------------------------------------------------------


class Worker:
    """The process of one stage.

    Args:
        shapes: block -> the shape of its output for one micro-batch.
    """

    def __init__(self, blocks: list[Block], graph: StageGraph, s: int, microbatches: int, shapes: Mapping[str, list[int]]) -> None:
        self.graph, self.s, self.count, self.shapes = graph, s, microbatches, shapes
        self.own = [block for block in blocks if graph.of[block.name] == s]
        self.takes = [block for block, reader in graph.edges if reader == s]
        self.gives = [(block, reader) for block, reader in graph.edges if graph.of[block] == s]
        self.order = schedule(graph, s, microbatches)
        parameters = [p for block in self.own for p in block.module.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """One mini-batch; the loss, where this stage has it, else 0."""
        parts = {name: field.chunk(self.count) for name, field in batch.items()}
        arriving = self._post_receives()
        sends = list[dist.Work]()
        flying: dict[int, dict[str, Tensor]] = {}
        loss = 0.0
        self.optimizer.zero_grad()
        for kind, m in self.order:
            if kind == "F":
                values = {name: chunks[m] for name, chunks in parts.items()}
                for block in self.takes:
                    work, tensor = arriving["F", block, self.s, m]
                    work.wait()
                    values[block] = tensor.requires_grad_()
                flying[m] = run_blocks(self.own, values)
                sends += [self._send("F", block, t, m, values[block].detach(), t) for block, t in self.gives]
                if "head" in values:
                    loss += values["head"].item() / self.count
            else:
                values = flying.pop(m)
                gradients: dict[str, Tensor] = {}
                for block, t in self.gives:  # an output that several stages read gets the sum of their gradients
                    work, tensor = arriving["B", block, t, m]
                    work.wait()
                    gradients[block] = gradients[block] + tensor if block in gradients else tensor
                if "head" in values:
                    gradients["head"] = torch.full_like(values["head"], 1 / self.count)
                torch.autograd.backward([values[block] for block in gradients], list(gradients.values()))
                for block in self.takes:
                    gradient = values[block].grad
                    assert gradient is not None, "every message is read"
                    sends.append(self._send("B", block, self.s, m, gradient, self.graph.of[block]))
        self.optimizer.step()
        for work in sends:
            work.wait()
        return loss

    def _post_receives(self) -> dict[tuple[str, str, int, int], tuple[dist.Work, Tensor]]:
        """Room for all messages of a step, asked for at once: no send waits for its receiver, so no order of passes can lock up."""
        out = {}
        for m in range(self.count):
            for kind, edges in (("F", [(block, self.s) for block in self.takes]), ("B", self.gives)):
                for block, reader in edges:
                    tensor = torch.empty(self.shapes[block])
                    sender = self.graph.of[block] if kind == "F" else reader
                    work = dist.irecv(tensor, sender, tag=self._tag(kind, block, reader, m))
                    assert work is not None
                    out[kind, block, reader, m] = work, tensor
        return out

    def _send(self, kind: str, block: str, reader: int, m: int, tensor: Tensor, to: int) -> dist.Work:
        work = dist.isend(tensor.contiguous(), to, tag=self._tag(kind, block, reader, m))
        assert work is not None
        return work

    def _tag(self, kind: str, block: str, reader: int, m: int) -> int:
        """A number for every message of a step."""
        return (2 * self.graph.edges.index((block, reader)) + (kind == "B")) * self.count + m


def _work(
    s: int, folder: str, graph: StageGraph, shapes: dict[str, list[int]], samples: int, microbatches: int, steps: int
) -> None:
    """What a process does; the one that has the loss writes it down."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=s, world_size=graph.size)
    worker = Worker(make_model(), graph, s, microbatches, shapes)
    losses, took = list[float](), list[float]()
    for step in range(steps):
        batch = make_batch(step, samples)
        dist.barrier()
        start = time.perf_counter()
        losses.append(worker.step(batch))
        took.append(time.perf_counter() - start)
    if graph.of["head"] == s:
        Path(folder, "result.json").write_text(json.dumps({"losses": losses, "seconds": median(took)}))
    dist.destroy_process_group()


def train(graph: StageGraph, samples: int, microbatches: int, steps: int) -> tuple[list[float], float]:
    """The losses of a training on as many processes as the graph has stages, and the median seconds of a step."""
    blocks, one = make_model(), {name: field[: samples // microbatches] for name, field in make_batch(0, samples).items()}
    shapes = {name: list(value.shape) for name, value in run_blocks(blocks, one).items()}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (folder, graph, shapes, samples, microbatches, steps), nprocs=graph.size)
        result = json.loads(Path(folder, "result.json").read_text())
    return result["losses"], result["seconds"]


def train_alone(samples: int, steps: int) -> list[float]:
    """The same training in this process, with plain torch and whole mini-batches: what every pipeline must equal."""
    blocks = make_model()
    optimizer = torch.optim.SGD([p for block in blocks for p in block.module.parameters()], lr=0.1, momentum=0.9)
    losses = list[float]()
    for step in range(steps):
        optimizer.zero_grad()
        loss = run_blocks(blocks, make_batch(step, samples))["head"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Measure, cut, predict, train, and compare."""
    parser = argparse.ArgumentParser(description="A graph pipeline in one file.")
    parser.add_argument("--devices", type=int, default=4, help="processes")
    parser.add_argument("--samples", type=int, default=64, help="of a mini-batch")
    parser.add_argument("--microbatches", type=int, default=8, help="of a mini-batch")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    if given.samples % given.microbatches:
        parser.error(f"--samples={given.samples} must be a multiple of --microbatches={given.microbatches}")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)

    blocks = make_model()
    one = {name: field[: given.samples // given.microbatches] for name, field in make_batch(0, given.samples).items()}
    seconds = measure(blocks, one)
    cuts = [(predict(cut, seconds, given.microbatches), cut) for cut in every_cut(blocks, given.devices)]
    best_s, best = min(cuts, key=lambda found: found[0])
    chain_s = min(took for took, cut in cuts if is_chain(cut))
    for s in range(best.size):
        names = ", ".join(name for name, own in best.of.items() if own == s)
        behind = ", ".join(f"stage {t}" for t in sorted(best.after(s))) or "nobody"
        print(f"stage {s}: {names}; {best.distance(s)} in flight; sends to {behind}")
    print(f"best of {len(cuts)} cuts: {1e3 * best_s:.2f} ms a step predicted; the best chain takes {1e3 * chain_s:.2f} ms")

    losses, took_s = train(best, given.samples, given.microbatches, given.steps)
    alone = train_alone(given.samples, given.steps)
    apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    print(f"losses {', '.join(f'{loss:.6f}' for loss in losses)}; a step took {1e3 * took_s:.2f} ms, messages included")
    print(f"largest difference from one process: {apart:.1e}")


if __name__ == "__main__":
    main()
