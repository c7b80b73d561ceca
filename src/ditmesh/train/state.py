"""What the next step of a run depends on: weights, optimizer, average, schedule; as checkpoints hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from ..comm.mesh import Mesh
from ..core.digests import digest, tensor_digest
from ..core.patching import parts_readable
from ..errors import InputError
from .checkpoints.checkpoint import Checkpoints
from .checkpoints.folder import run_settings
from .config import TrainConfig
from .gradients.sync import TensorSlicesOf
from .optimizer.optimizers import facts_of_state, fill_state, initialise_state, matching_state, optimizer_tensors
from .optimizer.update import WeightUpdate


class TrainState:
    """The state of a run over the ranks of a mesh; ``trained``: modules by name, parallelised and sharded already."""

    def __init__(
        self, config: TrainConfig, mesh: Mesh, trained: nn.ModuleDict, slices: TensorSlicesOf, update: WeightUpdate
    ) -> None:
        self._config, self._mesh, self._trained, self._slices, self._update = config, mesh, trained, slices, update

    def weights_digest(self) -> str:
        """A digest of the trained weights' bits; the same on any number of ranks in reproducible mode. Collective."""
        bits = digest(sorted((name, tensor_digest(value)) for name, value in self.weights().items()))
        # Only the first rank has the weights.
        return self._mesh.world.broadcast_object(bits)

    def tensors(self) -> dict[str, Any]:
        """The tensors that the next step depends on, whole but for shards. Collective."""
        options = StateDictOptions(ignore_frozen_params=True)
        gatherer = self._slices.whole
        optimizer = optimizer_tensors(self._update.optimizer, self._update.named)
        with parts_readable():
            own = get_model_state_dict(self._trained, options=options)
        state: dict[str, Any] = {
            "model": self._slices.mapped(own, gatherer),
            "optimizer": {"state": self._slices.mapped(optimizer, gatherer)},
        }
        if self._update.average is not None:
            names = [name for name, p in self._trained.named_parameters() if p.requires_grad]
            state["average"] = self._slices.mapped(
                dict(zip(names, self._update.average.shadow_params, strict=True)), gatherer
            )
            state["average_steps"] = torch.tensor(self._update.average.optimization_step)
        return state

    def facts(self, data: str) -> dict[str, Any]:
        """The other state of the next step, and the run's settings; ``data``: a digest of its samples."""
        return {
            "schedule": self._update.schedule.last_epoch,
            "settings": run_settings(self._config, data),
            "optimizer": facts_of_state(self._update.optimizer, self._update.named),
        }

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name, whole, on the CPU; nothing on other ranks than the first. Collective."""
        options = StateDictOptions(ignore_frozen_params=self._config.lora is not None)
        weights: dict[str, Tensor] = {}
        with parts_readable():
            own = get_model_state_dict(self._trained, options=options)
        for name, value in own.items():
            whole = self._slices.whole(name, cast(Tensor, value))
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            if self._mesh.rank == 0:
                weights[name] = whole.detach().to("cpu", copy=True)
        return weights

    def load(self, checkpoints: Checkpoints, folder: Path, facts: dict[str, Any]) -> int:
        """Read the state of a checkpoint; returns its step. Collective.

        Args:
            facts: as `facts` gave them.

        Raises:
            InputError: it does not fit this run, or has numbers that are not finite.
        """
        names, about = checkpoints.names(folder), facts.get("optimizer", {})
        initialise_state(self._update.optimizer, self._update.named)
        state = self.tensors()
        paths = set(state["model"])
        here = {f"model.{name}" for name in paths}
        there = {name for name in names if name.startswith("model.")}
        for some, where in ((here - there, "not in the checkpoint"), (there - here, "not trained by this run")):
            if some:
                raise InputError(
                    f"{folder} does not fit this run: {len(some)} of its weights are {where} "
                    f"({min(some).removeprefix('model.')} ...); resume with its run's train_modules, lora and model"
                )
        if ("average_steps" in state) != ("average_steps" in names):
            had = "had" if "average_steps" in names else "had not"
            raise InputError(
                f"ema_decay={self._config.optimizer.ema_decay}: the run of {folder} {had} an average; resume with "
                "its ema_decay"
            )
        another = facts.get("settings", {}).get("optimizer", "AdamW").lower() != self._config.optimizer.name.lower()
        kept = matching_state(state["optimizer"]["state"], set() if another else names, self._config.optimizer.name)
        state["optimizer"]["state"] = kept
        step = checkpoints.load(folder, state)
        options = StateDictOptions(strict=False, ignore_frozen_params=True)
        slicer = self._slices.own
        set_model_state_dict(self._trained, self._slices.mapped(state["model"], slicer), options=options)
        # Learning rate, decay and betas are those of this run.
        optimizer = self._slices.mapped(state["optimizer"]["state"], slicer)
        fill_state(self._update.optimizer, self._update.named, optimizer, {} if another else about)
        if self._update.average is not None:
            average = self._slices.mapped(state["average"], slicer)
            for mine, loaded in zip(self._update.average.shadow_params, average.values(), strict=True):
                mine.copy_(loaded)
            self._update.average.optimization_step = int(state["average_steps"])
        bad = self._update.bad_weights()
        if bad is not None:
            raise InputError(
                f"{folder}: {bad} is not finite; resume from an earlier checkpoint, which is named in full"
            )
        self._update.schedule_from(int(facts.get("schedule", step)))
        return step
