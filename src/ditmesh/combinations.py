"""Settings of a `ParallelConfig` that cannot be combined, strategy by strategy."""

from __future__ import annotations

import ast
import re
from math import isfinite
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, did_you_mean
from .staleness.policy import FORMS_WITHOUT_DRIFT
from .staleness.policy import parse as parse_warmup

if TYPE_CHECKING:
    from .config import ParallelConfig


# Name in a configuration -> diffusers' class of its settings.
CACHES = {
    "first-block": "FirstBlockCacheConfig",
    "mag": "MagCacheConfig",
    "pyramid": "PyramidAttentionBroadcastConfig",
    "sea": "SeaCacheConfig",
    "taylorseer": "TaylorSeerCacheConfig",
    "text-kv": "TextKVCacheConfig",
}


def check_combinations(config: ParallelConfig) -> None:
    """Reject settings that cannot be combined."""
    _check_shard(config)
    _check_speeds(config)
    _check_stages(config)
    _check_stale(config)
    if config.cache is not None:
        parse_cache(config.cache)
    if config.compile == "cudagraphs":
        raise ConfigError(
            "compile='cudagraphs' would record what ranks send once and never send it again; use compile='inductor'"
        )
    if config.reproducible:
        _check_reproducible(config)


def _check_shard(config: ParallelConfig) -> None:
    if config.replicas % config.shard:
        sharing = config.inputs == "per-data-rank" and config.data > 1
        cut = {"pipe", "tensor", *(("data",) if sharing else ())}
        product = " x ".join(f"{axis}={degree}" for axis, degree in config.degrees.items() if axis not in cut)
        fitting = [n for n in range(2, config.replicas + 1) if config.replicas % n == 0]
        raise ConfigError(
            f"shard={config.shard} does not divide the {config.replicas} "
            f"{'rank' if config.replicas == 1 else 'ranks'} of {product} that hold equal weights"
            + (" and share requests (inputs='per-data-rank')" if sharing else "")
            + "; use "
            + (f"shard={' or '.join(map(str, fitting))}" if fitting else "ulysses, ring, cfg or data with it")
            + (", or tensor or pipe to cut the weights" if not fitting else "")
        )
    if config.shard > 1 and config.reproducible and config.stages_or_patches and config.data > 1:
        raise ConfigError(
            f"shard={config.shard} needs as many calls on every rank, and with reproducible=True data={config.data} "
            f"ranks run their rows one by one through the patches of pipe={config.pipe}; use data=1"
        )


def _check_speeds(config: ParallelConfig) -> None:
    if isinstance(config.speeds, tuple):
        if any(not isfinite(speed) or speed <= 0 for speed in config.speeds):
            raise ConfigError(f"speeds={list(config.speeds)}: every speed must be above 0; leave a slow rank out")
        if not config.stages_or_patches and len(config.speeds) != config.sequence:
            raise ConfigError(
                f"speeds={list(config.speeds)} are {len(config.speeds)}, but ring={config.ring} x "
                f"ulysses={config.ulysses} is {config.sequence} sequence ranks; give one speed for each"
            )
    if config.speeds is not None and config.stages_or_patches:
        raise ConfigError(
            f"speeds={config.speeds!r} share out tokens, and a patch is cut evenly over the sequence ranks of its "
            "stage; with pipe give the number of blocks of every stage (stages), or leave speeds out"
        )


def _check_stages(config: ParallelConfig) -> None:
    if isinstance(config.stages, tuple) and (len(config.stages) != config.pipe or min(config.stages) < 1):
        raise ConfigError(
            f"stages={list(config.stages)} are not the blocks of pipe={config.pipe} stages; give one number from 1 up "
            "for each, or leave stages out"
        )


def _check_stale(config: ParallelConfig) -> None:
    if parse_warmup(config.warmup).reads_drift and config.stages_or_patches:
        raise ConfigError(
            f"warmup={config.warmup!r} decides by the drift of all keys, and patches of a step are still on their way "
            f"when the next one begins; with pipe or patches use {FORMS_WITHOUT_DRIFT}"
        )
    if config.stale_exchange and config.ulysses > 1:
        raise ConfigError(
            f"exchange={config.exchange!r} runs on the ring axis, not with ulysses={config.ulysses}; "
            f"use ring={config.sequence}"
        )
    if config.exchange == "gather" and (config.stages_or_patches or config.reproducible):
        mode = "reproducible mode" if config.reproducible else f"PipeFusion (pipe={config.pipe})"
        raise ConfigError(f"exchange='gather' adds nothing to {mode}, which gathers keys itself; leave it out")
    if config.exchange != "exact" and config.stages_or_patches:
        raise ConfigError(
            f"exchange={config.exchange!r} and pipe={config.pipe} are two stale strategies; use exchange='exact' "
            "inside the stages, or pipe=1"
        )
    if config.compress is not None and config.exchange != "displaced":
        raise ConfigError(
            f"compress={config.compress!r} is for exchange='displaced', not {config.exchange!r}; leave it out"
        )
    if config.predict is not None and not (config.exchange == "displaced" or config.stages_or_patches):
        raise ConfigError(f"predict={config.predict!r} is for exchange='displaced' and pipe; leave it out")
    if config.patches is not None and config.patches < config.pipe:
        raise ConfigError(
            f"patches={config.patches} leave some of pipe={config.pipe} stages idle; use patches >= {config.pipe}"
        )


def _check_reproducible(config: ParallelConfig) -> None:
    if config.tensor > 1:
        raise ConfigError(
            f"tensor={config.tensor} adds partial sums in an order that depends on the degree, so it cannot be "
            "reproducible; use ulysses or ring instead"
        )
    if config.compile is not None:
        raise ConfigError(
            f"compile={config.compile!r} chooses kernels by itself, so it cannot be reproducible; leave one out"
        )
    if config.exchange != "exact":
        raise ConfigError(
            f"exchange={config.exchange!r} gives a different image for every number of ranks, so it cannot be "
            "reproducible; use exchange='exact', or pipe with a fixed number of patches"
        )
    if config.vae == "bands":
        raise ConfigError(
            "vae='bands' adds the statistics of group norms up band by band, so it cannot be reproducible; use "
            "vae='whole' or leave it out"
        )
    if config.stages_or_patches:
        _check_reproducible_patches(config)
    if config.sequence > config.tiles:
        raise ConfigError(
            f"{config.sequence} sequence ranks cannot share tiles={config.tiles}; use tiles={config.sequence} or "
            "more (another number of tiles gives other bits)"
        )


def _check_reproducible_patches(config: ParallelConfig) -> None:
    if config.sequence > 1:
        raise ConfigError(
            f"ring={config.ring} x ulysses={config.ulysses} ranks would cut the patches of pipe={config.pipe}, "
            f"patches={config.patches or config.pipe} again, and the bits would depend on how many there are; with "
            "reproducible=True use more stages (pipe) or data for these ranks, or leave pipe and patches out"
        )
    if config.cfg > 1:
        raise ConfigError(
            f"with pipe or patches cfg={config.cfg} makes exact steps that one device would not: a branch that "
            "moves to another rank has no keys of the previous step; with reproducible=True use more stages (pipe) "
            "or data for these ranks, or leave pipe and patches out"
        )


def parse_cache(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The class of diffusers that a text such as ``"first-block(0.05)"`` names, and the arguments for it."""
    name, values = re.findall(r"^([^(]*)(.*)$", text.strip(), re.DOTALL)[0]
    if name not in CACHES:
        near = did_you_mean(name, CACHES) or f"; use one of {', '.join(CACHES)}"
        raise ConfigError(f"cache={text!r} is no cache of diffusers{near}")
    try:
        call: Any = ast.parse(f"_{values or '()'}", mode="eval").body
        args = [ast.literal_eval(value) for value in call.args]
        return CACHES[name], args, {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    except (AttributeError, SyntaxError, ValueError):
        raise ConfigError(f"cache={text!r} has values that cannot be read; write it as 'first-block(0.05)'") from None
