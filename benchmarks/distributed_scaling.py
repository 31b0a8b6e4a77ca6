"""How data-parallel training scales: measured on this machine, and modelled to thousands of ranks.

    python benchmarks/distributed_scaling.py measure      # two processes of one thread against one
    python benchmarks/distributed_scaling.py simulate     # a table for docs/distributed.md

`measure` also compares the bytes that a rank gives to collectives with the least possible: one copy of its
gradients. `simulate` needs no other process: it draws the times of ranks that are not equally fast.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# ---- measured ----------------------------------------------------------------------------------------

WIDTH, DEPTH, CLASSES = 512, 4, 10


def make_model(folder: Path) -> None:
    """A perceptron of about a million parameters."""
    import onnx

    from onward import artifacts

    helper = onnx.helper
    generator = np.random.default_rng(0)
    nodes, initializers, value = [], [], "x"
    for layer in range(DEPTH):
        outside = WIDTH if layer < DEPTH - 1 else CLASSES
        weight = (generator.normal(size=(WIDTH, outside)) / np.sqrt(WIDTH)).astype(np.float32)
        initializers.append(onnx.numpy_helper.from_array(weight, f"w{layer}"))
        made = f"h{layer}" if layer < DEPTH - 1 else "logits"
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [made]))
        if layer < DEPTH - 1:
            nodes.append(helper.make_node("Relu", [made], [f"r{layer}"]))
        value = f"r{layer}"
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", CLASSES])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    artifacts.generate_artifacts(
        model,
        requires_grad=["*"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )


def timed_rank(rank: int, world: int, port: int, folder: str, batch: int, updates: int, results: Any) -> None:
    """Train and report (seconds of each update, bytes given to collectives in one)."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
    from onward.distributed import History, RunnerSettings, ShardedArrays, TrainingRunner

    generator = np.random.default_rng(0)
    x = generator.normal(size=(batch * world, WIDTH)).astype(np.float32)
    labels = generator.integers(0, CLASSES, batch * world)
    with TrainingRunner(RunnerSettings(artifacts=folder, timeout=60, threads=1)) as runner:
        times, work = [], []
        for epoch in range(updates + 3):
            stream = iter(
                ShardedArrays(x, labels, batch_size=batch * world).epoch(epoch, rank=rank, world=world)
            )
            before = getattr(runner._comm, "sent", 0)
            start, busy = time.perf_counter(), time.process_time()
            runner._update(stream, History())
            times.append(time.perf_counter() - start)
            work.append(time.process_time() - busy)
            sent = getattr(runner._comm, "sent", 0) - before
        size = runner._engine.module.memory.gradients.vector.nbytes  # type: ignore[union-attr]
        results.put((rank, times[3:], work[3:], sent, size))


def measure(*, batch: int, updates: int, rounds: int) -> None:
    """Samples a second of one process and of two, in turns, since the machine may be busy."""
    import torch.distributed as dist

    context = multiprocessing.get_context("spawn")
    medians: dict[int, list[float]] = {1: [], 2: []}
    bests: dict[int, list[float]] = {1: [], 2: []}
    works: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for _ in range(rounds):
            for world in (1, 2):
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                results = context.Queue()
                ranks = [
                    context.Process(
                        target=timed_rank, args=(r, world, store.port, folder, batch, updates, results)
                    )
                    for r in range(world)
                ]
                for process in ranks:
                    process.start()
                found = [results.get(timeout=300) for _ in ranks]
                for process in ranks:
                    process.join()
                medians[world].append(statistics.median(t for found_rank in found for t in found_rank[1]))
                bests[world].append(min(t for found_rank in found for t in found_rank[1]))
                works[world].append(statistics.median(t for found_rank in found for t in found_rank[2]))
                sent, size = found[0][3], found[0][4]
    one, two = (min(medians[world]) for world in (1, 2))
    print(
        f"{batch} samples a rank, {size / 4e6:.2f} M parameters, one thread a rank, best median of {rounds}"
    )
    print(f"1 rank:  {one * 1e3:7.2f} ms an update, {batch / one:9.0f} samples/s")
    print(f"2 ranks: {two * 1e3:7.2f} ms an update, {2 * batch / two:9.0f} samples/s")
    print(f"efficiency {one / two:.0%}; of the fastest updates {min(bests[1]) / min(bests[2]):.0%}")
    print(
        f"processor time of a rank: {min(works[1]) * 1e3:.2f} ms alone, {min(works[2]) * 1e3:.2f} ms of two"
    )
    print(f"given to collectives: {sent} bytes an update; the gradients are {size} ({sent - size} more)")


# ---- modelled ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """What the model knows: seconds of work, seconds of a message, bytes a second, spread, failures.

    `spread` is the standard deviation of the logarithm of a rank's time for one update: ranks wait for the
    slowest. `life` is the mean time between failures of one rank, `restart` what a restart costs, `save` what a
    checkpoint costs, all in seconds.
    """

    compute: float = 0.25
    gradients: float = 100e6
    latency: float = 20e-6
    bandwidth: float = 10e9 / 8
    spread: float = 0.03
    life: float = 5 * 365 * 86400 / 10
    restart: float = 90.0
    save: float = 5.0


def all_reduce_seconds(cluster: Cluster, ranks: int, *, group: int = 1) -> float:
    """Rings, as gloo makes them: 2(N−1) messages in a row, 2(N−1)/N of the bytes over each line.

    In groups of G: 2(G−1) + 2(N/G−1) messages. The 40 bytes of control go the same way before.
    """
    messages = 2 * (ranks - 1) if group == 1 else 2 * (group - 1) + 2 * (ranks // group - 1)
    moved = 2 * (ranks - 1) / ranks * cluster.gradients / cluster.bandwidth
    return 2 * messages * cluster.latency + moved


def best_group(ranks: int) -> int:
    """The power of two that is nearest to √N, from below: rings of equal lengths."""
    return 2 ** int(np.log2(ranks) // 2)


def update_seconds(cluster: Cluster, ranks: int, *, group: int = 1, draws: int = 400, seed: int = 0) -> float:
    """The slowest of N ranks, then the reduction; the mean of many draws."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(-(cluster.spread**2) / 2, cluster.spread, size=(draws, ranks))
    return float(
        cluster.compute * np.exp(noise).max(axis=1).mean() + all_reduce_seconds(cluster, ranks, group=group)
    )


def kept_share(cluster: Cluster, ranks: int) -> tuple[float, float]:
    """Seconds between checkpoints that lose least (√(2·save·life/N)), and the share of time that is kept."""
    life = cluster.life / ranks
    interval = float(np.sqrt(2 * cluster.save * life))
    lost = cluster.save / interval + (interval / 2 + cluster.restart) / life
    return interval, max(0.0, 1 - lost)


def simulate() -> None:
    """One table: what N ranks are worth."""
    cluster = Cluster()
    alone = update_seconds(cluster, 1)
    print(
        "| ranks | all-reduce, one ring | in groups of | all-reduce | update | efficiency | save every | useful time |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for ranks in (1, 2, 8, 32, 128, 512, 2048, 4096):
        group = best_group(ranks)
        seconds = update_seconds(cluster, ranks, group=group)
        ring, levels = (all_reduce_seconds(cluster, ranks, group=g) * 1e3 for g in (1, group))
        interval, kept = kept_share(cluster, ranks)
        print(
            f"| {ranks} | {ring:.0f} ms | {group} | {levels:.0f} ms | {seconds * 1e3:.0f} ms "
            f"| {alone / seconds:.0%} | {interval / 60:.0f} min | {kept:.1%} |"
        )


def main() -> None:
    """Measure or simulate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "simulate"])
    parser.add_argument("--batch", type=int, default=256, help="samples of one rank")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.what == "simulate":
        simulate()
    else:
        measure(batch=options.batch, updates=options.updates, rounds=options.rounds)


if __name__ == "__main__":
    main()
