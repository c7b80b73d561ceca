"""The strategies in the order in which they are applied: from the inside of a call to its outside.

A strategy that a configuration does not want is not installed. Those that few want are imported only then.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .config import ParallelConfig
from .errors import ConfigError
from .layout import TokenLayout
from .strategies.base import LaterStrategy, Promise, Recipe, wanted
from .strategies.caches import Caches, state_clause
from .strategies.checked import CheckedCalls, CheckedLayout
from .strategies.compiled import CompiledBlocks
from .strategies.determinism import FixedArithmetic
from .strategies.inputs import QuietRanks, SameInputs
from .strategies.pipefusion.stages import PipelineStages
from .strategies.rows import BatchRows, DecodedRows
from .strategies.same_latents import SameLatents
from .strategies.sequence import ExactSequence, GatheredSequence
from .strategies.sharded import ShardedModels
from .strategies.tensor.parallel import TensorSlices
from .strategies.text_encoders import TextEncoders
from .strategies.tokens import KnownForms

# Strategies that not every configuration asks for, with what of it they need at least.
PRECOMPUTED = LaterStrategy("precomputed:Precomputed", lambda config: config.precompute)
STALE_STEPS = LaterStrategy("stale.warmup:StaleSteps", lambda config: config.stale_exchange or config.stages_or_patches)
REPRODUCIBLE = LaterStrategy("reproducible:ReproducibleSequence", lambda config: config.reproducible)
DISPLACED = LaterStrategy("stale.displaced:Displaced", lambda config: config.exchange == "displaced")
NAIVE = LaterStrategy("stale.displaced:Naive", lambda config: config.exchange == "naive")
PATCH_TOKENS = LaterStrategy("pipefusion.patches:PatchTokens", lambda config: config.stages_or_patches)
PIPEFUSION_CALLS = LaterStrategy("pipefusion.pipeline:PipeFusionCalls", lambda config: config.stages_or_patches)
BANDED_VAE = LaterStrategy("vae.parallel:BandedVae", lambda config: config.world_size > 1 and config.vae != "whole")

# Each strategy, and why it stands where it does.
RECIPE: Recipe = (
    PRECOMPUTED,  # around the model's own modules, under all that cuts their arguments
    TensorSlices,  # weights first: everything after it sees a rank's slices as the model's own
    PipelineStages,  # then whole blocks: those of other stages are never compiled, only passed over
    ShardedModels,  # then pieces of what a rank has left; inside all else, so that each forward finds whole weights
    CompiledBlocks,  # under the hooks: cutting and gathering depend on ranks and requests and are not to be traced
    STALE_STEPS,  # which steps are exact is known before a token strategy asks
    ExactSequence,  # exactly one of six: which tokens a rank has, and how attention sees those of the others
    GatheredSequence,  # in the place of ExactSequence
    REPRODUCIBLE,  # in the place of ExactSequence
    DISPLACED,  # in the place of ExactSequence
    NAIVE,  # in the place of ExactSequence
    PATCH_TOKENS,  # in the place of ExactSequence
    Caches,  # inside the patches and rows of a call: they skip blocks, and tokens are cut by then
    PIPEFUSION_CALLS,  # one call becomes a call for every patch: inside the rows, around the blocks
    BatchRows,  # rows and branches of guidance: around everything that is to see one branch
    KnownForms,  # outside the rows: a call of a new form is looked at whole
    CheckedLayout,  # outside all that a layout decides
    DecodedRows,  # the decoder sees whole latents, so its rows are shared out again
    BANDED_VAE,  # around the shared rows: it cuts what they would share
    TextEncoders,  # around the models: their first call frees encoders that have run
    FixedArithmetic,  # around all arithmetic of the ranks
    SameLatents,  # around all that shares a call out: it sees the latents as the pipeline gives them
    SameInputs,  # around everything: the rest of a request may rely on equal inputs
    QuietRanks,  # around everything, as SameInputs is
)


def checking(recipe: Recipe, config: ParallelConfig) -> Recipe:
    """The recipe with every layout compared with one device; `ConfigError`: no rank has all weights."""
    if config.cuts_weights:
        raise ConfigError(
            f"check=True compares calls with one device, and with {config.describe()} no rank has all weights; use "
            "ulysses, ring, cfg or data, or pass layout= to have the first call compared before weights are cut"
        )
    return tuple(CheckedCalls if strategy is CheckedLayout else strategy for strategy in recipe)


def check_recipe(recipe: Recipe, config: ParallelConfig, models: Iterable[tuple[nn.Module, TokenLayout]]) -> None:
    """Refuse, before any rank begins, strategies that cannot work with a model: `ConfigError` with a way out."""
    for model, layout in models:
        for strategy in wanted(recipe, config):
            strategy.check(config, model, layout)


def keeps_between_steps(recipe: Recipe, config: ParallelConfig, models: Iterable[nn.Module] = ()) -> str:
    """A clause that names the state of one request's step for the next; empty: there is none.

    Requests then cannot share a batch. Servers and predictions ask here. ``models``: that have been loaded; their
    caches keep something, whatever the configuration is.
    """
    kept = next((kept for one in wanted(recipe, config) if (kept := one.keeps_between_steps(config))), "")
    return kept or next((kept for model in models if (kept := state_clause(model))), "")


def promise_of(config: ParallelConfig, recipe: Recipe = RECIPE) -> Promise:
    """The promise of a configuration for its images, compared with one device.

    ``"bits"`` where a strategy fixes them, ``"none"`` where a strategy reuses what is stale, else ``"tolerance"``. A
    reproducible pipeline is stale and has the same bits: its one device runs as many patches.
    """
    promises = {strategy.promise for strategy in wanted(recipe, config)}
    if "bits" in promises:
        return "bits"
    return "none" if "none" in promises else "tolerance"
