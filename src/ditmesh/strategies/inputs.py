"""The same pipeline and the same inputs on every rank.

Ranks that disagree about a prompt, a seed or a weight make a picture that belongs to nobody. Before a pipeline starts,
its ranks compare digests of everything that must agree; by default the first rank's call is then what every rank runs.
"""

from __future__ import annotations

import copy
import dis
import hashlib
import inspect
import json
import pickle
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Link
from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.digests import WeightDigests, compared, digest, name_of
from ..errors import InputDifferenceWarning, InputError
from .base import Call, Context, Strategy
from .pipefusion.stages import blocks_of, spread_parameters
from .tensor.parallel import TensorParallel, already_cut

# Digests by name, in sections: what a refusal names first, and what in there.
Sections = dict[str, dict[str, str]]

# So many names are told of what differs.
TOLD = 4
# Settings that say where something lies, or by what it was written, not what it is.
_PLACES = ("name_or_path", "transformers_version", "hf_device_map", "deprecation_warnings", "files_loaded")
GENERATOR = "the default random generator"


@dataclass
class _Told:
    """What a rank tells the others of its pipeline and its call.

    Attributes:
        failed: what kept it from looking, in words; then the rest is empty.
        place: its stage and tensor rank. Ranks of one place hold the same parts of weights.
        pipeline: digest of every section that must agree on all ranks.
        parts: the same of what must agree on ranks of one place.
        inputs: digest of every argument, and whether all of it went in there; None: a function, which stays.
        generators: digest of the default generators.
    """

    failed: str = ""
    place: tuple[int, int] = (0, 0)
    pipeline: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, tuple[str, bool] | None] = field(default_factory=dict)
    generators: str = ""


class AgreedInputs:
    """Makes all ranks of a pipeline run the same call. Every rank makes one before weights are cut.

    Args:
        pipe: the pipeline.
        mesh: its ranks; with ``"per-data-rank"`` those of one data group (`Mesh.data_group`).
        policy: ``"broadcast"`` and ``"per-data-rank"``: every rank runs the first rank's inputs. ``"strict"``: inputs
            that differ are refused by name.
        cut: ids of the weights of which every rank holds another part already.
    """

    def __init__(self, pipe: Any, mesh: Mesh, policy: str, cut: Collection[int] = ()) -> None:
        self.pipe = pipe
        self.mesh = mesh
        self.policy = policy
        self._weights = WeightDigests(pipe)
        # Weights as they were before they were cut: afterwards no rank has them.
        self._whole = {name: told for name, (told, which) in self._weights.look().items() if which not in cut}
        self._spread: Callable[[], Collection[int]] = tuple
        self._settings = _Settings(pipe)
        self._warned: set[tuple[str, ...]] = set()
        # Where this rank's default generators stood, while they stand elsewhere for a call.
        self._generators: dict[str, Tensor] | None = None

    def placed(self, spread: Callable[[], Collection[int]]) -> None:
        """All weights have been cut.

        Args:
            spread: ids of the weights of which every rank holds another part at the moment.
        """
        self._spread = spread
        self._weights.look(adopt=True)

    @contextmanager
    def call(self) -> Iterator[None]:
        """The length of a pipeline's call: default generators that `agree` has moved are put back behind it."""
        try:
            yield
        finally:
            if self._generators is not None:
                _set_default_states(self.mesh.device, self._generators)
                self._generators = None

    def check(self, link: Link) -> None:
        """Compare the pipelines of all ranks of a link, which need not be those that share a call. Collective.

        Raises:
            InputError: on all ranks alike; the pipelines differ.
        """
        if link.size > 1:
            self._compare(link)

    def agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments all ranks run. Collective.

        Raises:
            InputError: on all ranks alike; the pipelines differ (weights, settings of a component, adapters), or, under
                ``"strict"``, the inputs do; or an argument that differs cannot be sent.
        """
        link = self.mesh.world
        if link.size == 1:
            return args, kwargs
        given = _named(self.pipe, args, kwargs)
        every = self._compare(link, given)
        if self.policy == "strict":
            return args, kwargs
        self._warn(every, link)
        first, me = every[0], every[link.rank]
        # A function stays each rank's own, and so does what is the same everywhere.
        given = {
            name: value
            for name, value in given.items()
            if me.inputs[name] is None or first.inputs.get(name) is not None
        }
        travelling = [
            name
            for name, told in first.inputs.items()
            if told is not None and not (told[1] and all(other.inputs.get(name) == told for other in every))
        ]
        moved = any(other.generators != first.generators for other in every)
        if travelling or moved:
            given.update(self._received(link, travelling, given, moved and first.generators != me.generators))
        return _unnamed(given)

    # --- comparing -------------------------------------------------------------------------------------------

    def _compare(self, link: Link, given: Mapping[str, Any] | None = None) -> list[_Told]:
        """What every rank tells.

        Raises:
            InputError: on all ranks alike.
        """
        sections: Sections = {}
        parts: Sections = {}
        told = _Told(place=(self.mesh.pipe.rank, self.mesh.tensor.rank))
        doing = "its pipeline"
        try:
            sections, parts = self._sections()
            told.pipeline = {name: _digest_of(section) for name, section in sections.items()}
            told.parts = {name: _digest_of(section) for name, section in parts.items()}
            for name, value in (given or {}).items():
                doing = f"argument {name}"
                # Under "strict" functions are compared by name.
                told.inputs[name] = compared(value) if self.policy == "strict" or not callable(value) else None
            told.generators = digest(_default_states(self.mesh.device)) if given is not None else ""
        except Exception as error:
            told = _Told(f"{doing} cannot be compared ({_words(error)})")
        every: list[_Told] = link.all_gather_object(told)
        _refuse_failed([other.failed for other in every], link)
        found: list[str] = []
        ranks = link.ranks
        for which, own, told_by in (("pipeline", sections, None), ("parts", parts, [other.place for other in every])):
            differing = differences([getattr(other, which) for other in every], ranks, told_by)
            if differing:
                # Rare, and worth another message: what in there differs.
                details = link.all_gather_object({name: own.get(name, {}) for name in differing})
                for name, phrase in differing.items():
                    inside = list(differences([each[name] for each in details], ranks, told_by))
                    found.append(f"{name} ({phrase}){_in_words(inside)}")
        if self.policy == "strict":
            strict = [{**{f"argument {n}": i for n, i in t.inputs.items()}, GENERATOR: t.generators} for t in every]
            found += [f"{name} ({phrase})" for name, phrase in differences(strict, ranks).items()]
        if found:
            raise InputError(
                f"the ranks disagree on {'; '.join(found)}. Load the same pipeline and pass the same inputs on every "
                "rank" + (", or use inputs='broadcast' to run rank 0's" if self.policy == "strict" else "")
            )
        return every

    def _sections(self) -> tuple[Sections, Sections]:
        """What no broadcast can mend, the pipeline itself: what is whole on every rank, and what is cut."""
        sections: Sections = {"pipeline class": {"": name_of(type(self.pipe))}}
        spread = self._spread()
        weights, slices = {}, {}
        for name, (told, which) in self._weights.look().items():
            if which in spread:
                slices[name] = told
                if name in self._whole:
                    weights[f"{name} before it was cut"] = self._whole[name]
            else:
                weights[name] = told
        sections["weights"] = weights
        sections.update(self._settings.sections())
        sections["LoRA adapters"] = {name: digest(active) for name, active in adapters(self.pipe).items()}
        return sections, {"slices of weights": slices}

    def _warn(self, every: list[_Told], link: Link) -> None:
        """Say once that inputs were given which are not used."""
        inputs = [{name: told for name, told in other.inputs.items() if told is not None} for other in every]
        differing = differences(inputs, link.ranks)
        names = tuple(sorted(differing))
        if link.rank > 0 or not names or names in self._warned:
            return
        self._warned.add(names)
        own = self.mesh.config.data > 1 and self.policy == "broadcast"
        warnings.warn(
            f"the ranks were given different inputs, and all of them run rank {link.ranks[0]}'s: "
            + "; ".join(f"argument {name} ({phrase})" for name, phrase in differing.items())
            + ". Pass the same on every rank"
            + (", or use inputs='per-data-rank' if every data rank has prompts of its own" if own else ""),
            InputDifferenceWarning,
            stacklevel=5,
        )

    # --- sending ---------------------------------------------------------------------------------------------

    def _received(self, link: Link, names: Sequence[str], own: Mapping[str, Any], move: bool) -> dict[str, Any]:
        """The first rank's arguments of these names; its default generators are taken over when they are to move.

        Raises:
            InputError: on all ranks alike; an argument cannot be sent, or not be received.
        """
        box: list[Any] = [None, ""]
        name = ""
        if link.rank == 0:
            packed: dict[str, bytes] = {}
            try:
                for name in names:
                    packed[name] = pickle.dumps(_pack(own[name]))
                box = [(packed, _default_states(self.mesh.device)), ""]
            except Exception as error:
                box = [None, f"argument {name} cannot be sent to other ranks ({_words(error)})"]
        sent, refused = link.broadcast_object(box)
        if refused:
            raise InputError(f"{refused}; make it on every rank and use inputs='strict', or leave it out")
        packed, states = sent
        received: dict[str, Any] = {}
        failed = ""
        if link.rank > 0:
            try:
                for name in names:
                    received[name] = _unpack(pickle.loads(packed[name]), own.get(name), self.mesh.device)
                if move:
                    self._generators = _default_states(self.mesh.device)
                    _set_default_states(self.mesh.device, states)
            except Exception as error:
                failed = f"argument {name} cannot be received ({_words(error)})"
        _refuse_failed(link.all_gather_object(failed), link)
        return received


def _refuse_failed(failed: Sequence[str], link: Link) -> None:
    found = [f"rank {rank}: {words}" for rank, words in zip(link.ranks, failed, strict=True) if words]
    if found:
        raise InputError(f"the ranks cannot compare their calls: {'; '.join(found)}; pass plain values and tensors")


def differences(
    every: Sequence[Mapping[str, Any]], ranks: Sequence[int], places: Sequence[Any] | None = None
) -> dict[str, str]:
    """For every field the ranks disagree on, a phrase that names the ranks.

    Args:
        every: each rank's fields.
        ranks: what the ranks are called.
        places: compare ranks of one place only, each with the first of them; default: all with the first.
    """
    places = places or [0] * len(every)
    found: dict[str, str] = {}
    for name in dict.fromkeys(key for fields in every for key in fields):
        odd: dict[int, list[int]] = {}
        for number, fields in enumerate(every):
            first = places.index(places[number])
            if fields.get(name) != every[first].get(name):
                odd.setdefault(ranks[first], []).append(ranks[number])
        phrases = [
            f"{'rank' if len(them) == 1 else 'ranks'} {', '.join(map(str, them))} "
            f"{'differs' if len(them) == 1 else 'differ'} from rank {first}"
            for first, them in odd.items()
        ]
        if phrases:
            found[name] = ", ".join(phrases)
    return found


def _in_words(names: Sequence[str]) -> str:
    names = [name for name in names if name]
    more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return f": {', '.join(names[:TOLD])}{more}" if names else ""


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _digest_of(section: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(section.items())).encode()).hexdigest()[:16]


# --- the pipeline ------------------------------------------------------------------------------------------------


class _Settings:
    """Digests of everything but weights that decides what a pipeline's components do.

    Configurations, the plain values that an object holds beside its configuration, the state of a scheduler that
    outlives a call, the vocabulary of a tokenizer.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        # Reading a vocabulary takes long: by component whose it was, how long it was, and its digest.
        self._vocabularies: dict[str, tuple[weakref.ref[Any], int, str]] = {}
        # By class of scheduler the attributes that every call sets anew.
        self._passing: dict[type, set[str]] = {}
        self.sections()

    def sections(self) -> Sections:
        """Digests by setting, in a section per component."""
        found: Sections = {"pipeline settings": _digests(_plain_values(self.pipe))}
        for name, value in vars(self.pipe).items():
            if name.startswith("_") or _is_plain(value):
                continue
            if hasattr(value, "set_timesteps"):
                found[name] = _digests({"": name_of(type(value)), **self._scheduler(value)})
            else:
                found[f"{name} settings"] = _digests(self._component(name, value))
        return found

    def _scheduler(self, scheduler: Any) -> dict[str, Any]:
        kind = type(scheduler)
        if kind not in self._passing:
            self._passing[kind] = _passing(kind)
        hidden = {"_internal_dict", *self._passing[kind]}
        own = {name: value for name, value in vars(scheduler).items() if name not in hidden}
        return {**_configuration(scheduler), **own}

    def _component(self, name: str, value: Any) -> dict[str, Any]:
        found = {"": name_of(type(value)), **_configuration(value), **_plain_values(value)}
        if hasattr(value, "get_vocab"):
            found["special tokens"] = repr(getattr(value, "special_tokens_map", None))
            found["added tokens"] = repr(getattr(value, "added_tokens_decoder", None))
            found["vocabulary"] = self._vocabulary(name, value)
        # A processor holds tokenizers and image processors of its own.
        for part in getattr(value, "attributes", None) or () if hasattr(value, "tokenizer") else ():
            inner = self._component(f"{name}.{part}", getattr(value, part))
            found.update({f"{part}.{key}": setting for key, setting in inner.items()})
        return found

    def _vocabulary(self, name: str, tokenizer: Any) -> str:
        known = self._vocabularies.get(name)
        if known is None or known[0]() is not tokenizer or known[1] != len(tokenizer):
            to_str = getattr(getattr(tokenizer, "backend_tokenizer", None), "to_str", None)
            whole = tokenizer.get_vocab() if to_str is None else json.loads(to_str())
            for passing in () if to_str is None else ("truncation", "padding"):
                whole.pop(passing, None)
            text = json.dumps(whole, sort_keys=True)
            known = (weakref.ref(tokenizer), len(tokenizer), hashlib.sha256(text.encode()).hexdigest())
            self._vocabularies[name] = known
        return known[2]


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


def _passing(kind: type) -> set[str]:
    """Attributes of a scheduler that a call sets anew: those that its methods set, but neither ``__init__`` nor a
    setter that is the user's (``set_shift``)."""
    found: set[str] = set()
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        users = name.startswith("set_") and name not in ("set_timesteps", "set_begin_index")
        if name != "__init__" and not users:
            code = inspect.unwrap(method).__code__
            found.update(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
    return found


def adapters(pipe: Any) -> dict[str, Any]:
    """Active LoRA adapters of every component, with their scales."""
    found: dict[str, Any] = {}
    for name, component in getattr(pipe, "components", {}).items():
        if not isinstance(component, nn.Module) or not getattr(component, "peft_config", None):
            continue
        for path, layer in component.named_modules():
            scaling = getattr(layer, "scaling", None)
            if isinstance(scaling, dict) and scaling:
                active = list(getattr(layer, "active_adapters", []))
                found[f"{name}.{path}"] = [(adapter, float(scaling.get(adapter, 0.0))) for adapter in active]
    return found


# --- the call ----------------------------------------------------------------------------------------------------


def _named(pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name; positional ones by number where the call will not take them."""
    parameters = list(inspect.signature(type(pipe).__call__).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][: len(args)]
    if len(names) < len(args) or not kwargs.keys().isdisjoint(names):
        names = [f"number {number}" for number in range(1, len(args) + 1)]
    return {**dict(zip(names, args, strict=True)), **kwargs}


def _unnamed(given: dict[str, Any]) -> Call:
    numbered = sorted((int(name.split()[1]), name) for name in given if name.startswith("number "))
    return tuple(given.pop(name) for _, name in numbered), given


@dataclass
class _Packed:
    """A tensor, or a generator's state, on its way to another rank."""

    kind: type
    device: str
    value: Tensor

    def unpacked(self, own: Any, device: torch.device) -> Any:
        """On the receiving rank: where its own value lies, else where the sender's did."""
        place = torch.device("cpu") if self.device == "cpu" else device
        if self.kind is not torch.Generator:
            return self.value.to(own.device if isinstance(own, Tensor) else place)
        # The caller's generator goes on as the first rank's does: the next call finds them alike.
        generator = own if isinstance(own, torch.Generator) and own.device.type == place.type else None
        generator = torch.Generator(place) if generator is None else generator
        return generator.set_state(self.value)


def _pack(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return _Packed(torch.Generator, value.device.type, value.get_state())
    if isinstance(value, Tensor):
        # Of its own: pickle takes all of what a tensor is a view of.
        return _Packed(Tensor, value.device.type, value.detach().clone().cpu())
    return _rebuilt(value, [_pack(item) for item in _items(value)])


def _unpack(value: Any, own: Any, device: torch.device) -> Any:
    if isinstance(value, _Packed):
        return value.unpacked(own, device)
    if isinstance(value, torch.device) and isinstance(own, torch.device) and value.type == own.type:
        return own
    items = _items(value)
    owns = _items(own) if type(own) is type(value) and len(_items(own)) == len(items) else [None] * len(items)
    return _rebuilt(value, [_unpack(item, mine, device) for item, mine in zip(items, owns, strict=True)])


def _items(value: Any) -> list[Any]:
    """What lies in a list, tuple or dict; nothing for anything else."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """A container with other items in it; anything else as it is."""
    if isinstance(value, dict):
        rebuilt = copy.copy(value)
        rebuilt.update(zip(value, items, strict=True))
        return rebuilt
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items) if isinstance(value, (list, tuple)) else value


def _default_states(device: torch.device) -> dict[str, Tensor]:
    """States of torch's default generators, of the CPU and of a device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_default_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


class SameInputs(Strategy):
    """The same inputs, weights and settings on every rank, for every pipeline."""

    name = "inputs"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._first: AgreedInputs | None = None
        self._agreed: dict[int, AgreedInputs] = {}
        self._call = ExitStack()

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`."""
        return config.world_size > 1 and config.inputs != "trust"

    def prepare(self, pipe: Any) -> None:
        """See `Strategy.prepare`: weights are looked at before any are cut."""
        if pipe is not None:
            self._first = self._of(pipe, self._cut_by_load())

    def _of(self, pipe: Any, cut: Collection[int]) -> AgreedInputs:
        return AgreedInputs(pipe, self.context.mesh, self.context.config.inputs, cut)

    def _cut_by_load(self) -> set[int]:
        """Ids of weights that `ditmesh.load` has cut: they differ from rank to rank, as they should."""
        degree = self.context.mesh.tensor.size
        found: set[int] = set()
        for model in self.context.models:
            names = spread_parameters(model.model, model.layout)
            if degree > 1:
                names |= already_cut(model.model, degree)
            found.update(id(model.model.get_parameter(name)) for name in names)
        return found

    def _spread(self) -> set[int]:
        """Ids of weights of which every rank holds another part at the moment."""
        found: set[int] = set()
        for model in self.context.models:
            if (tensor := model.find(TensorParallel)) is not None:
                found.update(tensor.spread())
            if self.context.config.pipe > 1:
                found.update(id(p) for _, block in blocks_of(model.model, model.layout) for p in block.parameters())
        return found

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        """See `Strategy.attach`: weights are where they will be."""
        first, self._first = self._first, None
        agreed = self._agreed[id(pipe)] = first or self._of(pipe, self._spread())
        undo.callback(self._agreed.pop, id(pipe))
        agreed.placed(self._spread)
        if self.context.config.inputs == "per-data-rank":
            # Later no data group waits for another.
            agreed.check(self.context.job.world)

    def arguments(self, pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """See `Strategy.arguments`."""
        self._call.enter_context(self._agreed[id(pipe)].call())
        return self._agreed[id(pipe)].agree(args, kwargs)

    def end_request(self, failed: bool) -> None:
        """See `Strategy.end_request`."""
        self._call.close()

    def outside_request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `Strategy.outside_request`: nobody has made these inputs the same, so they are compared.

        Raises:
            InputError: on all ranks alike; they differ.
        """
        world = self.context.mesh.world
        own = {f"number {n}": digest(value) for n, value in enumerate(args, 1)}
        own.update({name: digest(value) for name, value in kwargs.items()})
        differing = differences(world.all_gather_object(own), world.ranks)
        if differing:
            found = "; ".join(f"argument {name} ({phrase})" for name, phrase in differing.items())
            raise InputError(
                f"a parallel transformer was called outside of its pipeline, with inputs that differ: {found}; "
                "call ditmesh.parallelize() on the pipeline that calls it, too: its inputs are made the same then"
            )


class QuietRanks(Strategy):
    """One progress bar for all ranks."""

    name = "progress"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`."""
        return config.world_size > 1

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        """See `Strategy.attach`."""
        if self.context.mesh.rank > 0:
            before = vars(pipe).get("_progress_bar_config")
            undo.callback(_put_back, pipe, before)
            pipe.set_progress_bar_config(**{**(before or {}), "disable": True})


def _put_back(pipe: Any, progress: Any) -> None:
    if progress is None:
        vars(pipe).pop("_progress_bar_config", None)
    else:
        pipe._progress_bar_config = progress
