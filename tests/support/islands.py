"""Runs on islands, and what they do spelt out in one process."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditmesh.train import TrainConfig
from ditmesh.train.data.order import SampleOrder
from ditmesh.train.islands.link import Compressor
from ditmesh.train.trainer import Trainer


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _opened(given: dict[str, Any], timeout: float = 100.0) -> Trainer:
    import diffusers

    from ditmesh.zoo import path as find

    config = TrainConfig.read(given)
    name = config.pretrained_model_name_or_path
    pipe = diffusers.DiffusionPipeline.from_pretrained(name if Path(name).is_dir() else find(name))
    pipe.set_progress_bar_config(disable=True)
    return Trainer(config, pipe, timeout=timeout)


def weights_of(given: dict[str, Any]) -> dict[str, Any]:
    """A run's weights and what islands say of it. A rank function; ``until``, ``fails``: steps; ``timeout``."""
    until, fails, timeout = (given.get(name) for name in ("until", "fails", "timeout"))
    plain = {name: value for name, value in given.items() if name not in ("until", "fails", "timeout")}

    def report(progress: Any) -> None:
        if progress.step == fails:
            raise ArithmeticError("planted")

    with _opened(plain, timeout or 100.0) as trainer:
        outcome = trainer.run(until=until, report=report if fails else None)
        with trainer.update.averaged():
            average = trainer.weights()
        return {
            "weights": trainer.weights(),
            "average": average,
            "steps": outcome.step,
            "resumed": outcome.step - len(outcome.losses),
            "sent": 0 if trainer.islands is None else trainer.islands.link.sent,
            "every": None if trainer.islands is None else trainer.islands.every,
        }


def spelt_out(
    givens: list[dict[str, Any]],
    every: int,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    start: int = 0,
    compress: str = "none",
    delay: int = 0,
) -> dict[str, Tensor]:
    """The weights of islands, by the algorithm alone: local steps of separate runs, and outer steps by hand."""
    trainers = [_opened(given) for given in givens]
    try:
        for index, trainer in enumerate(trainers):
            order = trainer.data.order
            turns = order.per_step * len(trainers)

            def step(number: int, order: SampleOrder = order, turns: int = turns, index: int = index) -> Any:
                first = number * turns + index * order.per_step
                return [order._at(place) for place in range(first, first + order.per_step)]

            order.step = step
        parameters = [trainer.update.parameters for trainer in trainers]
        codecs = [Compressor(compress) for _ in trainers]
        outer = Outer(flat(parameters[0]).clone(), learning_rate, momentum)
        steps, last, pending = trainers[0].data.steps, 0, None
        for number in range(1, steps + 1):
            if number <= start:
                _together(trainers, parameters)
                if number == start:
                    outer.weights, last = flat(parameters[0]).clone(), number
                continue
            for trainer in trainers:
                trainer._optimizer_step(trainer.data.order.step(trainer.step))
                trainer.step += 1
                trainer.update.schedule.step()
            for turn in range(2):
                # What is under way first; then, perhaps at once, what is sent now.
                if turn and pending is None and number > last and (number == steps or number - last >= every):
                    pending = number, [flat(own).clone() for own in parameters]
                if pending is not None and (number == steps or number - pending[0] >= delay):
                    last, sent = pending
                    pairs = [*zip(codecs, sent, strict=True)]
                    outer.step([c.decode(c.encode(outer.weights - before), len(before)) for c, before in pairs])
                    for own, before in zip(parameters, sent, strict=True):
                        put(own, outer.weights + (flat(own) - before) if number > last else outer.weights)
                    pending = None
        return trainers[0].weights()
    finally:
        for trainer in trainers:
            trainer.close()


@dataclass
class Outer:
    """The outer optimizer: Nesterov's step, with the roundings of torch's SGD, in the direction of the mean change."""

    weights: Tensor
    rate: float
    momentum: float

    def __post_init__(self) -> None:
        self.speed = torch.zeros_like(self.weights)

    def step(self, changes: list[Tensor]) -> None:
        gradient = torch.stack(changes).mean(0)
        self.speed = self.speed.mul(self.momentum).add(gradient)
        along = gradient.add(self.speed, alpha=self.momentum) if self.momentum else gradient
        self.weights = self.weights.add(along, alpha=-self.rate)


def flat(some: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in some])


def put(some: Sequence[Tensor], values: Tensor) -> None:
    for one, part in zip(some, values.split([p.numel() for p in some]), strict=True):
        one.data.copy_(part.view_as(one))


def _together(trainers: list[Trainer], parameters: Any) -> None:
    """A step of all islands with the mean of their gradients."""
    for trainer in trainers:
        sync = trainer.parallel.sync
        batches = trainer.data.order.step(trainer.step)
        samples = sum(batch.count for batch in batches)
        for number, batch in enumerate(batches):
            with sync.accumulating(number, len(batches), is_last=number == len(batches) - 1):
                (trainer._losses(batch).sum() * (sync.share / samples)).backward()
        sync.reduce([list(range(len(batches)))])
    for ones in zip(*parameters, strict=True):
        mean = torch.stack([one.grad for one in ones]).mean(0)
        for one in ones:
            one.grad = mean.clone()
    for trainer in trainers:
        trainer.update.apply(trainer.parallel.sync, trainer.step + 1)
        trainer.step += 1
        trainer.update.schedule.step()
