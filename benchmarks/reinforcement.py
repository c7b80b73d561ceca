"""Reinforcement learning: held-out rewards, the same bits on any ranks, samples a second.

    python benchmarks/reinforcement.py learning bits close --json benchmarks/measured/reinforcement.json
    python benchmarks/reinforcement.py speed        # two minutes; wants a quiet machine

Runs are those of examples/reinforcement.yaml; ranks have one thread each.

*learning*: three seeds; rewards of held-out prompts over the updates. Runs stay in ``--out``, and what is finished
there is not trained again. Images of the first seed, before and after, go into ``measured/reinforcement.png``.
*bits*, *close*: 200 updates in groups of two, on 1, 2 and 4 ranks, in reproducible mode and without it: rewards,
divergences, weights' digest.
*speed*: samples a second, of rollout, rewards and update together, on two data ranks and on one, in turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import yaml
from rich.console import Console

from figures import MEASURED
from harness import write_compactly
from training import in_turns, measure, ranks_of, trainer_of

RUN = Path(__file__).resolve().parents[1] / "examples" / "reinforcement.yaml"
sys.path.insert(0, str(RUN.parent))  # Of one of its rewards; ranks have this process's path.
SEEDS = (0, 1, 2)
MESHES = {"1 rank": {}, "data=2": {"data": 2}, "data=2, ulysses=2": {"data": 2, "ulysses": 2}}


def run_of(folder: Path | str, steps: int | None, reinforce: dict[str, Any] | None = None, **more: Any) -> Any:
    """The settings of `RUN` with changes; so many updates."""
    from ditmesh.train.config import TrainConfig

    run = yaml.safe_load(RUN.read_text(encoding="utf-8")) | {"output_dir": str(folder)} | more
    run["reinforce"] |= reinforce or {}
    run["optimizer"] |= {"max_train_steps": steps} if steps else {}
    return TrainConfig.read(run)


def followed(given: Any) -> dict[str, Any]:
    """Numbers of every step of a run, and the digest of its weights."""
    found: dict[str, list[float]] = {"reward": [], "kl": [], "log_probability_difference": []}
    with trainer_of(given) as trainer:
        trainer.run(report=lambda now: [each.append(now.numbers[name]) for name, each in found.items()])
        return {**found, "weights": trainer.state.weights_digest()}


def learning(options: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Rewards by seed, of the samples of each step and of held-out prompts."""
    from PIL import Image

    from ditmesh.launch import RankPool
    from ditmesh.train.logs import read_log
    from ditmesh.train.run import train

    runs, found = options.out or work, {}
    for seed in SEEDS:
        folder = runs / f"s{seed}"
        run = run_of(folder, options.steps, seed=seed)
        if not (folder / "lora").exists():
            with RankPool(1, threads=1) as pool:
                pool.run(train, run)
        rows, held_out = read_log(folder / "loss.csv"), read_log(folder / "validation.csv")
        found[str(seed)] = {name: [row[name] for row in rows] for name in ("reward", "log_probability_difference")}
        for name in [name for name in held_out[0] if name.startswith("validation_reward")]:
            title = name.replace("validation_reward", "held out", 1)
            found[str(seed)][title] = {int(row["step"]): row[name] for row in held_out}
        before, after = held_out[0]["validation_reward"], held_out[-1]["validation_reward"]
        console.print(f"seed {seed}: held-out reward {before:.4f} before, {after:.4f} after {len(rows)} updates")
    start = runs / f"s{SEEDS[0]}" / "validation" / "step-"
    names = [[f"{start}{row['step']:.0f}-{number}.png" for number in range(12)] for row in (held_out[0], held_out[-1])]
    lines = [np.concatenate([np.asarray(Image.open(name)) for name in line], axis=1) for line in names]
    Image.fromarray(np.concatenate(lines)).save(MEASURED / "reinforcement.png", optimize=True)
    return found


def bits(options: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Rewards, divergences and weights by mesh, in reproducible mode."""
    return by_mesh(options, work, console, {"reproducible": True})


def close(options: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """The same without reproducible mode, at the run's learning rate or another."""
    rate = {"optimizer": {"learning_rate": options.rate, "train_batch_size": 8}} if options.rate else {}
    return by_mesh(options, work, console, {}, **rate)


def by_mesh(options: Any, work: Path, console: Console, how: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Numbers of every update by mesh, of which the first has one rank."""
    from ditmesh.launch import RankPool

    found, changes = dict[str, Any](), {"group_size": 2, "kl_weight": 0.01}
    for mesh, degrees in MESHES.items():
        run = run_of(tempfile.mkdtemp(dir=work), options.steps or 200, changes, parallel={**degrees, **how}, **more)
        with RankPool(ranks_of({"parallel": degrees}), threads=1) as pool:
            found[mesh], *others = pool.run(followed, run)
        assert all(other == found[mesh] for other in others)
        alone = found["1 rank"]
        far = {name: max(map(abs, np.subtract(found[mesh][name], alone[name]))) for name in ("reward", "kl")}
        same = "equal to 1 rank" if found[mesh] == alone else f"largest differences from 1 rank {far}"
        console.print(f"{mesh}: weights {found[mesh]['weights']}, {same}")
    return found


def speed(options: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Samples a second, in turns."""
    title = "emoji-flux, 16 samples in a step, of which one of four denoising steps is trained; one thread a rank"
    lines: dict[str, dict[str, Any] | None] = {"1 rank": {}, "data=2": {"parallel": {"data": 2}}}

    def run(settings: dict[str, Any] | None) -> Any:
        return run_of(tempfile.mkdtemp(dir=work), 1 + (options.steps or 5), **(settings or {}))

    return in_turns(lines, run, options.repeats, title, console)


PARTS = {"learning": learning, "bits": bits, "close": close, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="updates: of learning, bits, close (200), of a turn of speed (5)")
    parser.add_argument("--rate", type=float, help="learning rate of close")
    parser.add_argument("--repeats", type=int, default=5, help="turns of speed")
    parser.add_argument("--out", type=Path, help="keep the runs of learning in this folder")
    measure(parser, PARTS, write_compactly)


if __name__ == "__main__":
    main()
