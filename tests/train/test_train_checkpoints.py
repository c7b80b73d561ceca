"""Checkpoints: whole or not there, and loaded by other ranks than those that wrote them."""

from __future__ import annotations

import os

import torch

import ditmesh
from ditmesh.comm.mesh import Mesh
from ditmesh.train.checkpoints.checkpoint import Checkpoints, broken
from support.train import data_and_model, made, tiny_settings, trainer_of

data = made(lambda folder: data_and_model(folder, 6))


def saved(folder, step, keep=None):
    checkpoints = Checkpoints(folder, Mesh(ditmesh.ParallelConfig()), keep)
    problem = checkpoints.save(step, {"weight": torch.full((3,), float(step))})
    checkpoints.close()
    return problem


def test_the_name_is_given_last_and_the_last_good_one_stays(tmp_path, monkeypatch):
    """Broken off between any two renames, the newest that was written is found."""
    for step in (1, 2, 3):
        assert saved(tmp_path, step, 2) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    # A run that begins anew in the same folder: what it writes stays, and so does what was there.
    assert saved(tmp_path, 1, 1) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    rename, left = os.replace, []

    def broken_off(source, target):
        if not left.pop():
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr("ditmesh.train.checkpoints.checkpoint.os.replace", broken_off)
    for count in (0, 1, 2):
        # Of the file of digests, of the one that makes room, of the checkpoint.
        left[:] = [False] * 9 + [True] * count
        assert "No space left" in saved(tmp_path, 3, None)
        monkeypatch.setattr("ditmesh.train.checkpoints.checkpoint.os.replace", rename)
        found = Checkpoints(tmp_path, Mesh(ditmesh.ParallelConfig())).find("latest")
        assert found.name == "checkpoint-3"
        assert broken(found) is None
        monkeypatch.setattr("ditmesh.train.checkpoints.checkpoint.os.replace", broken_off)


# --- on other ranks --------------------------------------------------------------------------------------------

SETTINGS = {"ema_decay": 0.9, "lr_scheduler": "cosine", "lr_warmup_steps": 3, "max_grad_norm": 0.5}


def state_of(given, steps=None):
    """Losses of a run, and what would be saved at its end, whole."""
    with trainer_of(given) as trainer:
        losses = trainer.run(until=steps).losses
        state = trainer.state.tensors()
        rate = trainer.update.optimizer.param_groups[0]["lr"]
    average = {name: value.clone() for name, value in state.get("average", {}).items()}
    return losses, rate, average


def test_other_ranks_go_on(ranks, data, tmp_path):
    """Two sequence ranks, then one, then two data ranks: the curve, rate and average of one run of one rank."""
    given = tiny_settings(data, tmp_path / "parts", global_batch_size=2, train_batch_size=1, max_train_steps=3)
    given |= {"seed": 1, "learning_rate": 1e-3, **SETTINGS}
    curve, rate, average = state_of({**given, "output_dir": str(tmp_path / "whole")})
    on = {**given, "resume_from_checkpoint": "latest"}
    found = dict(ranks(2).run(state_of, {**given, "parallel": {"ulysses": 2}}, 1)[0][0])
    found |= state_of(on, 2)[0]
    last = ranks(2).run(state_of, {**on, "parallel": {"data": 2}})
    found |= last[0][0]
    assert sorted(found) == [0, 1, 2]
    assert all(abs(found[step] / curve[step] - 1) <= 1e-3 for step in curve), (found, curve)
    for _, its_rate, its_average in last:
        assert its_rate == rate
        assert its_average.keys() == average.keys()
        for name, value in average.items():
            assert (its_average[name] - value).abs().max() <= 1e-3, name
