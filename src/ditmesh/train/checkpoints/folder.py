"""The output folder of a run: its owner, its lock, and the settings that a resumed run may change.

A run has an identity, which its checkpoints carry. A run that goes on from an earlier checkpoint than its newest has
another from there on, so that the later ones of its former course are not taken for its own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from pathlib import Path
from typing import IO, Any

from ...core.files import lock_of, written_whole
from ...errors import InputError
from ..config import TrainConfig

RUN, LOCK = "run.json", "run.lock"
# Files of a run: a folder with one of these belongs to a run.
LEFT = ("checkpoint-*", "pipeline", "lora")

# Settings without effect on data and loss, or covered by another entry (the data's digest, the batch).
NO_MATTER = {
    # Their samples, weights and settings are in the data's digest.
    *("train_data", "class_data_dir", "mask_dir", "conditioning_dir"),
    *("output_dir", "train_data_dir", "cache_dir", "report_to", "from_scratch", "parallel", "data_speeds", "sharding"),
    *("checkpointing_steps", "checkpoints_total_limit", "checkpointing_async", "gradient_checkpointing"),
    *("resume_from_checkpoint", "resume_allow_changed", "gradient_accumulation_steps", "global_batch_size"),
    *("validation_prompts", "validation_steps", "validation_inference_steps", "guidance_scale"),
    # The digest tells which samples are left to train on.
    *("validation_data_dir", "validation_split", "validation_samples"),
}
# Settings with a new value from the first step on.
AT_ONCE = {
    *("learning_rate", "scale_lr", "lr_scheduler", "lr_warmup_steps", "lr_decay_steps", "lr_num_cycles", "lr_power"),
    *("compile", "encoder_precision"),
    *("adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon", "max_grad_norm", "ema_decay"),
    *("max_train_steps", "num_train_epochs", "mixed_precision", "reproducible"),
    *("lora.dropout", "optimizer_args"),
}
# Settings with which the checkpoint has states of other weights.
OTHER_WEIGHTS = {
    "train_modules",
    "use_ema",
    "lora",
    "lora.rank",
    "lora.target_modules",
    "lora.type",
    "lora.decompose_factor",
}


def occupied(folder: Path) -> Path | None:
    """The file of an earlier run that another run would overwrite; None: none."""
    return next((path for pattern in LEFT for path in sorted(folder.glob(pattern))), None)


def check_output(config: TrainConfig) -> None:
    """Reject a run into the output folder of another run, before any rank starts.

    Raises:
        InputError: another run has left something there, or works there now.
    """
    folder = Path(config.output_dir)
    if not folder.is_dir():
        return
    held = _held(folder)
    held.close()
    _check_unoccupied(config, folder)


def _check_unoccupied(config: TrainConfig, folder: Path) -> None:
    wanted = config.resume_from_checkpoint
    found = occupied(folder)
    if found is None or wanted == "latest" or (wanted is not None and _inside(folder, wanted)):
        return
    raise InputError(
        f"output_dir={config.output_dir!r} has {found.name} of an earlier run; resume that run with --resume, or "
        "give another output_dir"
    )


def _inside(folder: Path, wanted: str) -> bool:
    there = Path(wanted) if Path(wanted).is_dir() else folder / wanted
    return there.parent.resolve() == folder.resolve()


def _held(folder: Path) -> IO[str]:
    try:
        held = lock_of(folder / LOCK)
    except OSError as error:
        raise InputError(f"output_dir={str(folder)!r} cannot be written to: {error}") from None
    if held is None:
        with contextlib.suppress(OSError):
            who = (folder / LOCK).read_text(encoding="utf-8").strip()
            raise InputError(
                f"output_dir={str(folder)!r} is used by another run (process {who or 'unknown'}); wait for its end, or "
                "give another output_dir"
            )
        raise InputError(f"output_dir={str(folder)!r} is used by another run; give another output_dir")
    return held


class RunFolder:
    """The output folder, held by the process of the first rank.

    Attributes:
        runs: that have written this run's checkpoints, oldest first: an identity (None: of a version that had none) and
            the last step that counts, None for all.

    Raises:
        InputError: it is another run's.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.path = Path(config.output_dir)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output_dir={config.output_dir!r} cannot be written to: {error}") from None
        self._lock = _held(self.path)
        try:
            _check_unoccupied(config, self.path)
            self.runs = self._known() if occupied(self.path) is not None else []
        except BaseException:
            self.close()
            raise

    def _known(self) -> list[tuple[str | None, int | None]]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((self.path / RUN).read_text(encoding="utf-8"))["runs"]
            return [(run, until) for run, until in found]
        # The file was deleted, or an earlier version wrote the folder: the newest checkpoint has the identity.
        newest, its = -1, None
        for manifest in self.path.glob("checkpoint-*/manifest.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                about = json.loads(manifest.read_text(encoding="utf-8"))
                if about["step"] > newest:
                    newest, its = about["step"], about.get("run")
        return [(its, None)]

    @property
    def run(self) -> str:
        """The identity that this run's next checkpoints carry."""
        run, _ = self.runs[-1]
        assert run is not None
        return run

    def begin(self, checkpoint: Path | None, step: int, run: str | None) -> None:
        """Record that the run begins, or resumes from a checkpoint of ``step`` written by ``run``.

        Raises:
            OSError: the note cannot be written.
        """
        if checkpoint is None or not _inside(self.path, str(checkpoint)):
            self.runs = [(uuid.uuid4().hex[:16], None)]
        else:
            later = [
                path
                for path in self.path.glob("checkpoint-*")
                if path.name.removeprefix("checkpoint-").isdigit() and int(path.name.removeprefix("checkpoint-")) > step
            ]
            known = [one for one, _ in self.runs]
            if run is None or run != known[-1] or later:
                before = self.runs[: known.index(run)] if run in known else []
                self.runs = [*before, (run, step), (uuid.uuid4().hex[:16], None)]
                log = self.path / "loss.csv"
                if later and log.exists():
                    # Rows of steps that will be repeated differently.
                    shutil.copy(log, self.path / f"loss-until-{later[-1].name}.csv")
        with written_whole(self.path / RUN) as part:
            part.write_text(json.dumps({"runs": self.runs}), encoding="utf-8")

    def close(self) -> None:
        """Free the folder for other runs."""
        self._lock.close()


def run_settings(config: TrainConfig, data: str) -> dict[str, Any]:
    """A run's settings for its checkpoints, as JSON data.

    Args:
        data: a digest of the samples.
    """
    return {**config.model_dump(mode="json"), "batch": config.batch, "data": data}
