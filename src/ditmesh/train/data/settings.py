"""The settings of one data set of several, and of the words around its captions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

_Pixels = Annotated[int, Field(ge=1, le=2**16)]
_Share = Annotated[float, Field(ge=0, le=1)]


class DataSetConfig(BaseModel):
    """One data set of `TrainConfig.train_data`; a setting that is left out is the run's.

    Attributes:
        dir: as ``train_data_dir``.
        weight: how often an epoch has each sample: 2 twice, 0.5 every other one.
        image_column, caption_column, label_column: as for the run.
        resolution, aspect_ratio_buckets, random_flip: as for the run.
        instance_prompt, caption_prefix, caption_suffix, trigger_word, multiline_captions: as for the run.
        shuffle_tags, keep_tokens, tag_separator, tag_dropout: as for the run.
        mask_dir, mask_column, conditioning_dir, conditioning_image_column: as for the run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    dir: str
    weight: Annotated[float, Field(gt=0, le=1e4)] = 1.0
    image_column: str | None = None
    caption_column: str | None = None
    label_column: str | None = None
    resolution: _Pixels | None = None
    aspect_ratio_buckets: str | None = None
    random_flip: bool | None = None
    instance_prompt: str | None = None
    caption_prefix: str | None = None
    caption_suffix: str | None = None
    trigger_word: str | None = None
    multiline_captions: bool | None = None
    shuffle_tags: bool | None = None
    keep_tokens: Annotated[int, Field(ge=0)] | None = None
    tag_separator: Annotated[str, Field(min_length=1)] | None = None
    tag_dropout: _Share | None = None
    mask_dir: str | None = None
    mask_column: str | None = None
    conditioning_dir: str | None = None
    conditioning_image_column: str | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """The run's settings that are others for this data set."""
        own = {name: getattr(self, name) for name in self.model_fields_set if name not in ("dir", "weight")}
        if own.get("resolution") is not None and own.get("aspect_ratio_buckets") is None:
            # The run's buckets are of the run's resolution.
            own["aspect_ratio_buckets"] = None
        return {"train_data_dir": self.dir, **own}


def class_image_settings(folder: str, prompt: str | None) -> dict[str, Any]:
    """The settings of the class images of prior preservation that are not the run's: their captions are left alone."""
    none = (
        "class_data_dir",
        "trigger_word",
        "mask_dir",
        "mask_column",
        "conditioning_dir",
        "conditioning_image_column",
    )
    return {
        **dict.fromkeys(none),
        "train_data_dir": folder,
        "instance_prompt": prompt,
        "caption_prefix": "",
        "caption_suffix": "",
        "shuffle_tags": False,
        "tag_dropout": 0.0,
    }
