"""Checks for the same pipeline and the same inputs on every rank.

Ranks that disagree about a prompt, a seed or a weight make an image of no request. Before a pipeline starts,
its ranks compare digests of everything that must agree; by default the first rank's call is then what every rank runs.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_map_with_path

from ..attention.kernels import backends_of
from ..comm import Link
from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.arguments import Arguments, parameter_names
from ..core.digests import WeightDigests, compared, digest, qualified_name
from ..core.generators import default_states, set_default_states
from ..errors import InputDifferenceWarning, InputError, shortened
from .base import CallArguments, Context, Strategy
from .pipefusion.stages import IN_PIECES, blocks_of, spread_parameters
from .sharded import ShardedWeights
from .tensor.parallel import TensorParallel, already_cut
from .text_encoders import TextEncoders

# Digests by name, in sections: what a refusal names first, and what in there.
Sections = dict[str, dict[str, str]]

# A message names so many of the things that differ.
MAX_NAMED = 4
# The section of which ranks hold other parts: those with the same part compare it.
SLICES = "slices of weights"
# The name of arguments by position that the call has no names for.
POSITIONAL = "by position"
# Settings about the origin of a component, which do not affect its results.
_PLACES = ("name_or_path", "transformers_version", "hf_device_map", "deprecation_warnings", "files_loaded")


@dataclass
class _Digests:
    """One rank's digests of its pipeline and its call, or the error that prevented them.

    Attributes:
        place: its stage and tensor rank: ranks of one place hold the same parts of weights.
        inputs: of every argument, and whether all of it went in there; None: a function, which stays.
    """

    failed: str = ""
    place: tuple[int, int] = (0, 0)
    sections: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, tuple[str, bool] | None] = field(default_factory=dict)
    generators: str = ""


class AgreedInputs:
    """Makes all ranks of a pipeline run the first rank's call. Every rank makes one before weights are cut.

    Args:
        mesh: its ranks; with ``"per-data-rank"`` those of one data group (`Mesh.data_group`).
        cut: ids of the weights of which every rank holds another part already.
    """

    def __init__(self, pipe: Any, mesh: Mesh, cut: Collection[int] = ()) -> None:
        self.pipe = pipe
        self.mesh = mesh
        self._weights = WeightDigests(pipe)
        # Weights as they were before they were cut: afterwards no rank has them.
        read = self._weights.look()
        self._whole = {name: weight for name, (weight, which) in read.items() if which not in cut}
        self._spread: Callable[[], Collection[int]] = tuple
        self._moved: Callable[[], Collection[int]] = tuple
        # Reading a vocabulary takes long: by tokenizer how long it was, and its digest.
        self._vocabularies: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
        self._settings()
        self._warned: set[tuple[str, ...]] = set()

    def placed(self, spread: Callable[[], Collection[int]], moved: Callable[[], Collection[int]]) -> None:
        """All weights have been cut: ids of those that are ``spread`` over ranks now, and of those that come and go."""
        self._spread, self._moved = spread, moved
        self._weights.look(adopt=True)

    def agree(self, args: tuple[Any, ...], kwargs: dict[str, Any], undo: ExitStack) -> CallArguments:
        """The arguments all ranks run. Collective.

        ``undo``: is to be closed when the call is over: puts back default generators that were moved. `InputError`: on
        all ranks alike; the pipelines differ (weights, settings of a component, adapters), or an argument that differs
        cannot be sent.
        """
        link = self.mesh.world
        if link.size == 1:
            return args, kwargs
        given = _named(self.pipe, args, kwargs)
        every = self.compare(link, given)
        self._warn(every, link)
        first, me = every[0], every[link.rank]
        # Functions, and values equal on all ranks, are not sent.
        given = {n: value for n, value in given.items() if me.inputs[n] is None or first.inputs.get(n) is not None}
        travelling = [
            name
            for name, sent in first.inputs.items()
            if sent is not None and not (sent[1] and all(other.inputs.get(name) == sent for other in every))
        ]
        moved = any(other.generators != first.generators for other in every)
        if travelling or moved:
            given.update(self._received(link, travelling, given, undo if first.generators != me.generators else None))
        return given.pop(POSITIONAL, ()), given

    # --- comparing -------------------------------------------------------------------------------------------

    def compare(self, link: Link, given: Mapping[str, Any] | None = None) -> list[_Digests]:
        """Every rank's digests of pipeline and arguments; `InputError` on all if pipelines differ. Collective."""
        sections, own = self._own(given)
        every: list[_Digests] = link.all_gather_object(own)
        ranked = zip(link.ranks, every, strict=True)
        if failed := [f"rank {rank}: {other.failed}" for rank, other in ranked if other.failed]:
            raise InputError(
                f"the ranks cannot compare their calls: {'; '.join(failed)}; pass plain values and tensors"
            )
        wrong: list[str] = []
        for name in dict.fromkeys(name for other in every for name in other.sections):
            among = [other.place for other in every] if name == SLICES else None
            differing = rank_differences([{name: other.sections.get(name)} for other in every], link.ranks, among)
            if differing:
                # Rare, so another message may find the difference.
                details = rank_differences(link.all_gather_object(sections.get(name, {})), link.ranks, among)
                inside = [*filter(None, details)]
                more = f" and {len(inside) - MAX_NAMED} more" if len(inside) > MAX_NAMED else ""
                wrong.append(f"{name} ({differing[name]}){': ' * bool(inside)}{', '.join(inside[:MAX_NAMED])}{more}")
        if wrong:
            raise InputError(f"the ranks disagree on {'; '.join(wrong)}. Load the same pipeline on every rank")
        return every

    def _own(self, given: Mapping[str, Any] | None) -> tuple[Sections, _Digests]:
        """This rank's `_sections`, and digests of them and of the arguments, or why there are none."""
        sections: Sections = {}
        digests = _Digests(place=(self.mesh.pipe.rank, self.mesh.tensor.rank))
        doing = "its pipeline"
        try:
            sections = self._sections()
            digests.sections = _digests(sections)
            for name, value in (given or {}).items():
                doing = f"argument {name}"
                digests.inputs[name] = None if callable(value) else compared(value)
            digests.generators = digest(default_states(self.mesh.device)) if given is not None else ""
        except Exception as error:
            digests = _Digests(f"{doing} cannot be compared ({shortened(error, with_kind=True)})")
        return sections, digests

    def _sections(self) -> Sections:
        """Digests of the pipeline itself, which no broadcast can repair."""
        spread, moved = self._spread(), self._moved()
        weights, slices = {}, {}
        for name, (weight, which) in self._weights.look().items():
            if which in spread or which in moved:
                if which in spread:
                    slices[name] = weight
                if name in self._whole:
                    weights[f"{name} before it was cut"] = self._whole[name]
            else:
                weights[name] = weight
        return {
            "pipeline class": {"": qualified_name(type(self.pipe))},
            "weights": weights,
            **self._settings(),
            "LoRA adapters": _digests(adapters(self.pipe)),
            SLICES: slices,
        }

    def _settings(self) -> Sections:
        """Digests of everything except weights that affects the components, one section per component.

        Configurations, the plain values that an object holds beside its configuration, the vocabulary of a tokenizer.
        """
        sections: Sections = {"pipeline settings": _digests(_plain_values(self.pipe))}
        for name, value in vars(self.pipe).items():
            if not name.startswith("_") and not _is_plain(value):
                section = name if hasattr(value, "set_timesteps") else f"{name} settings"
                sections[section] = _digests(self._component(value))
        return sections

    def _component(self, value: Any) -> dict[str, Any]:
        settings = {"": qualified_name(type(value)), **_configuration(value)}
        if hasattr(value, "set_timesteps"):
            # What else it holds comes and goes with a call; latents that differ for it are noticed (`same_latents`).
            return settings
        settings.update(_plain_values(value))
        if hasattr(value, "set_attention_backend"):
            settings["attention backend"] = sorted(backends_of(value.modules()))
        if hasattr(value, "get_vocab"):
            settings["special tokens"] = repr(getattr(value, "special_tokens_map", None))
            settings["added tokens"] = repr(getattr(value, "added_tokens_decoder", None))
            settings["vocabulary"] = self._vocabulary(value)
        # A processor holds tokenizers and image processors of its own.
        for part in getattr(value, "attributes", None) or () if hasattr(value, "tokenizer") else ():
            inner = self._component(getattr(value, part))
            settings.update({f"{part}.{key}": setting for key, setting in inner.items()})
        return settings

    def _vocabulary(self, tokenizer: Any) -> str:
        entry = self._vocabularies.get(tokenizer)
        if entry is None or entry[0] != len(tokenizer):
            to_str = getattr(getattr(tokenizer, "backend_tokenizer", None), "to_str", None)
            whole = tokenizer.get_vocab() if to_str is None else json.loads(to_str())
            for passing in () if to_str is None else ("truncation", "padding"):
                whole.pop(passing, None)
            text = json.dumps(whole, sort_keys=True)
            entry = self._vocabularies[tokenizer] = len(tokenizer), hashlib.sha256(text.encode()).hexdigest()
        return entry[1]

    def _warn(self, every: list[_Digests], link: Link) -> None:
        """Say once that inputs were given which are not used."""
        inputs = [{name: given for name, given in other.inputs.items() if given is not None} for other in every]
        differing = rank_differences(inputs, link.ranks)
        names = tuple(sorted(differing))
        if link.rank > 0 or not names or names in self._warned:
            return
        self._warned.add(names)
        hint = self.mesh.config.data > 1 and self.mesh.config.inputs == "broadcast"
        warnings.warn(
            f"the ranks were given different inputs, and all of them run rank {link.ranks[0]}'s: "
            + _arguments_in_words(differing)
            + ". Pass the same on every rank"
            + (", or use inputs='per-data-rank' if every data rank has prompts of its own" if hint else ""),
            InputDifferenceWarning,
            stacklevel=5,
        )

    # --- sending ---------------------------------------------------------------------------------------------

    def _received(
        self, link: Link, names: Sequence[str], arguments: Mapping[str, Any], undo: ExitStack | None
    ) -> dict[str, Any]:
        """The first rank's arguments of these names; until ``undo`` is closed its default generators, too."""
        packed: dict[str, bytes] = {}
        name = refused = ""
        if link.rank == 0:
            try:
                for name in names:
                    packed[name] = pickle.dumps(tree_map(_packed, arguments[name]))
            except Exception as error:
                refused = f"argument {name} cannot be sent to other ranks ({shortened(error, with_kind=True)})"
        packed, states, refused = link.broadcast_object([packed, default_states(self.mesh.device), refused])
        if refused:
            raise InputError(f"{refused}; leave it out, or make the same on every rank and use inputs='trust'")
        received: dict[str, Any] = {}
        for name in names if link.rank > 0 else ():
            # On this rank's devices, and its own value part by part where it has the same parts.
            places = dict(tree_flatten_with_path(arguments.get(name))[0])
            unpack = partial(_unpacked, places, self.mesh.device)
            received[name] = tree_map_with_path(unpack, pickle.loads(packed[name]))
        if undo is not None:
            undo.callback(set_default_states, self.mesh.device, default_states(self.mesh.device))
            set_default_states(self.mesh.device, states)
        return received


def rank_differences(
    every: Sequence[Mapping[str, Any]], ranks: Sequence[int], places: Sequence[Any] | None = None
) -> dict[str, str]:
    """For every field of ``every`` rank that they disagree on, a phrase that names the ranks.

    ``places``: compare ranks of one place only, each with the first of them; default: all with the first.
    """
    places = places or [0] * len(every)
    phrases: dict[str, str] = {}
    for name in dict.fromkeys(key for fields in every for key in fields):
        odd: dict[int, list[int]] = {}
        for number, fields in enumerate(every):
            first = places.index(places[number])
            if fields.get(name) != every[first].get(name):
                odd.setdefault(ranks[first], []).append(ranks[number])
        if odd:
            phrases[name] = ", ".join(
                f"{'rank' if len(them) == 1 else 'ranks'} {', '.join(map(str, them))} "
                f"{'differs' if len(them) == 1 else 'differ'} from rank {first}"
                for first, them in odd.items()
            )
    return phrases


def _arguments_in_words(differing: Mapping[str, str]) -> str:
    return "; ".join(f"argument {name} ({phrase})" for name, phrase in differing.items())


# --- the pipeline ------------------------------------------------------------------------------------------------


def _digests(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(value) for name, value in settings.items()}


def _configuration(value: Any) -> dict[str, Any]:
    """The configuration of a component of diffusers or transformers, without where it came from."""
    config = getattr(value, "config", None)
    if config is None and not hasattr(value, "get_vocab") and not hasattr(value, "tokenizer"):
        # Image processors are their own configuration.
        config = value
    if not isinstance(config, Mapping):
        to_dict = getattr(config, "to_dict", None)
        config = to_dict() if callable(to_dict) else {}
    assert isinstance(config, Mapping)
    return {
        f"config.{name}": setting
        for name, setting in config.items()
        if not str(name).startswith("_") and name not in _PLACES
    }


def _plain_values(value: Any) -> dict[str, Any]:
    """Numbers, words and short collections of them that an object holds by public names."""
    return {
        name: setting
        for name, setting in getattr(value, "__dict__", {}).items()
        if not name.startswith("_") and not name.endswith("_file") and name not in _PLACES and _is_plain(setting)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_plain([*value, *value.values()])
    if isinstance(value, (list, tuple, set, frozenset)):
        return len(value) <= 1000 and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def adapters(pipe: Any) -> dict[str, Any]:
    """Active LoRA adapters of every component, with their scales."""
    active: dict[str, Any] = {}
    for name, component in getattr(pipe, "components", {}).items():
        if not isinstance(component, nn.Module) or not getattr(component, "peft_config", None):
            continue
        for path, layer in component.named_modules():
            scaling = getattr(layer, "scaling", None)
            if isinstance(scaling, dict) and scaling:
                known = getattr(layer, "active_adapters", [])
                active[f"{name}.{path}"] = [(adapter, float(scaling.get(adapter, 0.0))) for adapter in known]
    return active


# --- the call ----------------------------------------------------------------------------------------------------


def _named(pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name; those by position as one where the call will not take them."""
    names: Sequence[str] = parameter_names(type(pipe).__call__)[: len(args)]
    if len(names) < len(args) or not kwargs.keys().isdisjoint(names):
        return {POSITIONAL: args, **kwargs}
    return {**dict(zip(names, args, strict=True)), **kwargs}


@dataclass
class _Packed:
    """A tensor, or a generator's state, on its way to another rank."""

    kind: type
    device: str
    value: Tensor


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return _Packed(torch.Generator, value.device.type, value.get_state())
    # Of its own: pickle takes all of what a tensor is a view of.
    return _Packed(Tensor, value.device.type, value.detach().clone().cpu()) if isinstance(value, Tensor) else value


def _unpacked(places: Mapping[Any, Any], device: torch.device, path: Any, value: Any) -> Any:
    """The values that `_packed` made: this rank's own value of a path where it lies there, else the sender's."""
    twin = places.get(path)
    if not isinstance(value, _Packed):
        alike = isinstance(value, torch.device) and isinstance(twin, torch.device) and value.type == twin.type
        return twin if alike else value
    place = torch.device("cpu") if value.device == "cpu" else device
    if value.kind is Tensor:
        return value.value.to(twin.device if isinstance(twin, Tensor) else place)
    # The caller's generator goes on as the first rank's does: the next call finds them alike.
    generator = twin if isinstance(twin, torch.Generator) and twin.device.type == place.type else torch.Generator(place)
    return generator.set_state(value.value)


class SameInputs(Strategy):
    """Ensures the same inputs, weights and settings on every rank, for every pipeline."""

    name = "inputs"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._agreed: dict[int, AgreedInputs] = {}
        self._call = ExitStack()

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.world_size > 1 and config.inputs != "trust"

    def prepare(self, pipe: Any) -> None:
        if pipe is None:
            return
        # Weights that `ditmesh.load` has cut differ from rank to rank, as they should.
        degree, cut = self.context.mesh.tensor.size, set[int]()
        for model in self.context.models:
            names = spread_parameters(model.model, model.layout)
            names |= already_cut(model.model, degree) if degree > 1 else set()
            cut.update(id(model.model.get_parameter(name)) for name in names)
            cut.update(id(parameter) for parameter in model.model.parameters() if hasattr(parameter, IN_PIECES))
        # Weights are hashed before any others are cut.
        self._agreed[id(pipe)] = AgreedInputs(pipe, self.context.mesh, cut)

    def _spread(self) -> set[int]:
        """Ids of weights that are currently split over ranks."""
        ids: set[int] = set()
        for model in self.context.models:
            if (tensor := model.find(TensorParallel)) is not None:
                ids.update(tensor.spread())
            if (sharded := model.find(ShardedWeights)) is not None:
                ids.update(sharded.spread())
            if self.context.config.pipe > 1:
                ids.update(id(p) for _, block in blocks_of(model.model, model.layout) for p in block.parameters())
        return ids

    def _moved(self) -> set[int]:
        """Ids of weights that some ranks hold, or that come and go."""
        encoders = self.context.find(TextEncoders)
        return set() if encoders is None else encoders.moved()

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        # Weights are where they will be.
        agreed = self._agreed.get(id(pipe)) or AgreedInputs(pipe, self.context.mesh, self._spread() | self._moved())
        self._agreed[id(pipe)] = agreed
        undo.callback(self._agreed.pop, id(pipe))
        agreed.placed(self._spread, self._moved)
        if self.context.config.inputs == "per-data-rank":
            # From here on no data group waits for another.
            agreed.compare(self.context.job.world)

    def arguments(self, pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        return self._agreed[id(pipe)].agree(args, kwargs, self._call)

    def end_request(self, failed: bool) -> None:
        self._call.close()

    def _differing(self, arguments: Arguments, **others: str) -> str:
        """The arguments of a transformer's call, and other digests, that differ between ranks, in words. Collective."""
        link = self.context.mesh.world
        given = {**{f"number {n}": value for n, value in enumerate(arguments.args, 1)}, **arguments.kwargs}
        return _arguments_in_words(rank_differences(link.all_gather_object({**_digests(given), **others}), link.ranks))

    def before_training(self, model: nn.Module, arguments: Arguments) -> None:
        # Exchanges in backward are made where something requires a gradient.
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        tracked = [leaf.requires_grad for leaf in tree_leaves(arguments.passed) if isinstance(leaf, Tensor)]
        recorded = digest((trained, tracked, torch.is_grad_enabled()))
        if differing := self._differing(arguments, requires_grad=recorded):
            raise InputError(
                f"{type(model).__name__} is trained with inputs that differ: {differing}; give "
                "the same samples, noise and timesteps to all ranks"
                + (
                    " of a data rank"
                    if self.context.config.inputs == "per-data-rank"
                    else ", or use inputs='per-data-rank' with data=N if every data rank has samples of its own"
                )
            )

    def outside_request(self, arguments: Arguments) -> None:
        # These inputs were not broadcast: on all ranks alike they are compared, and refused if they differ.
        if differing := self._differing(arguments):
            raise InputError(
                f"a parallel transformer was called outside of its pipeline, with inputs that differ: {differing}; "
                "call ditmesh.parallelize() on the pipeline that calls it, too: its inputs are made the same then"
            )


class QuietRanks(Strategy):
    """One progress bar for all ranks."""

    name = "progress"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.world_size > 1

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        if self.context.mesh.rank > 0:
            before = {name: value for name, value in vars(pipe).items() if name == "_progress_bar_config"}
            undo.callback(vars(pipe).update, before)
            undo.callback(vars(pipe).pop, "_progress_bar_config", None)
            pipe.set_progress_bar_config(**{**before.get("_progress_bar_config", {}), "disable": True})
