"""Calls that rank 0 makes and the other ranks follow."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.comm import PeerError
from ditmesh.core.values import as_bytes
from ditmesh.followers.messages import pack_call, take_call
from engine.test_first_call import ForeignPipeline, call, model
from support.models import ODD, inputs, relative_error, tiny


class Faulty(Exception):
    """What a planted fault raises."""


@pytest.fixture(scope="module")
def started() -> Iterator[ditmesh.Followers]:
    with ditmesh.Followers(2, "cpu", 1, timeout=60) as followers:
        yield followers


@pytest.fixture
def followers(started: ditmesh.Followers) -> Iterator[ditmesh.Followers]:
    yield started
    assert not started.closed, started.reason
    for followed in list(started.models.values()):
        followed.close()


def _later(given):
    """Another value of the first tensor: the others stay."""
    name = next(key for key, value in given.items() if isinstance(value, torch.Tensor))
    return {name: given[name] * 0.5}


@torch.no_grad()
@pytest.mark.parametrize(("config", "name"), [({"ulysses": 2}, None), ({"ring": 2}, "Flux"), ({"tensor": 2}, "SD3")])
def test_a_transformer_that_one_rank_calls(followers, config, name):
    net, given = (model(), call()) if name is None else (tiny(name), inputs(name, ODD))
    before, kind = set(vars(net)), type(net)
    truth = [net(**given)[0], net(**{**given, **_later(given)})[0]]
    handle = followers.parallelize(net, config)
    outputs = [net(**{**given, **changes})[0] for changes in ({}, {}, _later(given))]
    ditmesh.restore(net)
    assert handle.closed
    assert max(map(relative_error, outputs, [truth[0], *truth])) <= 1e-5
    assert set(vars(net)) == before
    assert type(net) is kind
    assert torch.equal(net(**given)[0], truth[0])


def test_weights_are_compared_once_in_a_pipelines_call(followers):
    pipe, words = ForeignPipeline(model()), torch.randn(1, 11, 10, generator=torch.Generator().manual_seed(1))
    truth = pipe(words, torch.Generator().manual_seed(5))
    handle = followers.parallelize(pipe.transformer, {"ulysses": 2})
    reads: list[bool] = []
    changes = handle._copied.changes
    handle._copied.changes = lambda read, rewritten: reads.append(read) or changes(read, rewritten)
    for _ in range(2):
        assert relative_error(pipe(words, torch.Generator().manual_seed(5)), truth) <= 1e-5
    assert reads == [True, False, False] * 2
    # Weights are written to between two requests.
    pipe.transformer.out.weight.data.mul_(1.5)
    changed = pipe(words, torch.Generator().manual_seed(5))
    handle.close()
    assert relative_error(changed, pipe(words, torch.Generator().manual_seed(5))) <= 1e-5
    assert relative_error(changed, truth) > 1e-3


class Trapped(type(model())):
    def forward(self, picture, words, when, *, sharpness=None, trap=None):
        if trap is not None and dist.is_initialized() and dist.get_rank() == trap:
            raise Faulty(f"rank {trap} fails")
        return super().forward(picture, words, when, sharpness=sharpness)


@torch.no_grad()
@pytest.mark.parametrize("trap", [0, 1])
def test_an_error_on_one_rank_reaches_rank_0_and_the_next_call_runs(followers, trap):
    torch.manual_seed(0)
    net, given = Trapped().eval(), call()
    truth = net(**given)[0]
    followers.parallelize(net, {"ulysses": 2})
    assert relative_error(net(**given, trap=-1)[0], truth) <= 1e-5
    with pytest.raises(Faulty, match=f"rank {trap} fails"):
        net(**given, trap=trap)
    with pytest.raises(ditmesh.InputError, match=r"sharpness.*cannot be sent to the other ranks"):
        net(**given, sharpness=threading.Lock())
    assert relative_error(net(**given, trap=-1)[0], truth) <= 1e-5
    ditmesh.restore(net)


def test_gradients_are_refused_and_never_waited_for(followers):
    net, given = model(), call()
    truth = net(**given)[0].detach()
    followers.parallelize(net, {"ulysses": 2})
    # Weights of from_pretrained require gradients, and few programs say torch.no_grad().
    output = net(**given)[0]
    assert relative_error(output, truth) <= 1e-5
    assert not output.requires_grad
    with pytest.raises(ditmesh.InputError, match="passes no gradient"):
        net(**{**given, "picture": given["picture"].clone().requires_grad_()})
    net.train()
    with pytest.raises(ditmesh.InputError, match="in training mode"):
        net(**given)
    net.eval()
    assert relative_error(net(**given)[0], truth) <= 1e-5


@torch.no_grad()
def test_a_followed_model_in_a_graph_runs_outside_of_it(followers):
    net, given = model(), call()
    truth = net(**given)[0]
    followers.parallelize(net, {"ulysses": 2})
    compiled = torch.compile(net, backend="eager")
    for _ in range(2):
        assert relative_error(compiled(**given)[0], truth) <= 1e-5
    net.compile(backend="eager")
    with pytest.raises(ditmesh.InputError, match="other modules than when it was copied, or compiled ones"):
        net(**given)
    torch._dynamo.reset()


@torch.no_grad()
def test_what_is_parallelised_already_is_refused(followers):
    net, given = model(), call()
    truth = net(**given)[0]
    followers.parallelize(net, {"ulysses": 2})
    with pytest.raises(ditmesh.InputError, match="this Foreign is parallelised already"):
        followers.parallelize(net, {"ulysses": 2})
    for part in (net.layers[0], torch.nn.Sequential(net)):
        with pytest.raises(
            ditmesh.InputError, match="has modules in common with a Foreign that is parallelised already"
        ):
            followers.parallelize(part, {"ulysses": 2})
    assert relative_error(net(**given)[0], truth) <= 1e-5


@torch.no_grad()
def test_models_that_the_program_drops_are_freed(followers):
    for _ in range(2):
        net = model()
        followers.parallelize(net, {"ulysses": 2})
        net(**call())
        dropped = weakref.ref(net)
        del net
        gc.collect()
        assert dropped() is None
        assert followers.run(_copies) == [0]


def _copies():
    from ditmesh.followers.followers import copies

    return len(copies)


def test_a_class_that_is_patched_and_a_hook_of_all_modules_are_refused(followers, monkeypatch):
    net, given = model(), call()
    followers.parallelize(net, {"ulysses": 2})
    net(**given)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    with pytest.raises(ditmesh.InputError, match="a forward hook of all modules"):
        net(**given)
    hook.remove()
    forward = type(net.layers[0]).forward
    monkeypatch.setattr(type(net.layers[0]), "forward", lambda *args, **kwargs: forward(*args, **kwargs))
    with pytest.raises(ditmesh.InputError, match=r"'forward' of the class \w+ was replaced after"):
        net(**given)


@torch.no_grad()
@pytest.mark.parametrize("leaves", ["with", "close", "call"])
def test_a_forked_child_leaves_the_ranks_alone(followers, leaves):
    net, given = model(), call()
    followers.parallelize(net, {"ulysses": 2})
    truth = net(**given)[0]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if leaves == "with":
                with followers:
                    pass
            elif leaves == "close":
                followers._pool.close()
                followers.close()
            else:
                with pytest.raises(ditmesh.ConfigError, match="of which this one is a fork"):
                    net(**given)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(net(**given)[0], truth)


class NoMesh:
    """What calls are sent over, without ranks."""

    device = torch.device("cpu")

    class world:  # noqa: N801
        @staticmethod
        def broadcast(message, source):
            NoMesh.message = message if NoMesh.sends else message.copy_(NoMesh.message)


def through(value):
    content, send = pack_call(NoMesh, value)
    NoMesh.sends = True
    send()
    NoMesh.sends = False
    return take_call(NoMesh, content)


@pytest.mark.parametrize("inference", [False, True])
def test_what_arrives_is_what_was_sent(inference):
    with torch.inference_mode(inference):
        kinds = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
        value = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
        value |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "turned": torch.randn(4, 3).T, "text": "x"}
        value["twice"] = [value["scalar"], value["turned"]]
        function = lambda number: number + 1  # noqa: E731
        value["function"] = function
        got = through(value)
        assert got["function"](1) == 2
        assert got["text"] == "x"
        assert got["twice"][0] is got["scalar"]
        for name, sent in value.items():
            if isinstance(sent, torch.Tensor):
                assert got[name].dtype == sent.dtype
                assert torch.equal(as_bytes(got[name]), as_bytes(sent))
        generator = torch.Generator().manual_seed(4)
        mine, theirs = torch.rand(3, generator=generator.clone_state()), through({"g": generator})["g"]
        assert torch.equal(torch.rand(3, generator=theirs), mine)


class Scaled:
    """An attention processor with a strength, as those of image prompts have one."""

    def __init__(self, inner):
        self.inner, self.strengths = inner, [1.0]

    def __call__(self, attn, hidden_states, *args, **kwargs):
        outputs = self.inner(attn, hidden_states, *args, **kwargs)
        return tuple(None if output is None else output * self.strengths[0] for output in outputs)


class Edited:
    """A tiny SD3 with an adapter, and what a program may do to it between two calls.

    Every method that begins with a kind and an underscore is an edit, which has a random number generator.
    """

    def __init__(self):
        from peft import LoraConfig

        torch.manual_seed(0)
        self.net = copy.deepcopy(tiny("SD3"))
        adapter = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"])
        self.net.add_adapter(adapter, adapter_name="x")
        self.block.attn.processor = Scaled(self.block.attn.processor)
        self.hooks, self.fused, self.strength = [], False, [1.1]

    @property
    def block(self):
        return self.net.transformer_blocks[0]

    @property
    def weight(self):
        return self.block.ff.net[2].weight

    def layers(self):
        return [module for module in self.net.modules() if "x" in getattr(module, "lora_B", ())]

    @torch.no_grad()
    def weight_in_place(self, factor):
        self.weight.mul_(factor)

    def weight_data_in_place(self, factor):
        self.weight.data += 0.01 * factor

    def weight_data_assigned(self, factor):
        self.weight.data = self.weight.data * factor

    def weight_through_numpy(self, factor):
        self.weight.detach().numpy()[...] *= factor

    def weight_in_inference_mode(self, factor):
        with torch.inference_mode():
            self.weight.mul_(factor)

    def weight_rows_swapped(self, factor):
        rows = self.weight.detach().numpy()
        rows[[0, 7]] = rows[[7, 0]]

    def weight_replaced(self, factor):
        self.block.ff.net[2].weight = torch.nn.Parameter(self.weight.detach() * factor)

    def weight_loaded(self, factor):
        self.net.load_state_dict({name: value * factor for name, value in self.net.state_dict().items()})

    @torch.no_grad()
    def weight_foreach(self, factor):
        torch._foreach_mul_(list(self.net.parameters()), factor)

    def weight_optimizer(self, factor):
        parameters = [parameter.requires_grad_() for parameter in self.block.parameters()]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1)
        torch.optim.AdamW(parameters, lr=0.01 * factor, fused=True).step()
        for parameter in parameters:
            parameter.grad = None

    def adapter_scaled(self, factor):
        for layer in self.layers():
            layer.set_scale("x", factor)

    def adapter_weight(self, factor):
        self.layers()[0].lora_B["x"].weight.data.mul_(2 * factor)

    def adapter_fused(self, factor):
        self.net.unfuse_lora() if self.fused else self.net.fuse_lora(lora_scale=factor)
        self.fused = not self.fused

    def adapter_switched(self, factor):
        self.net.disable_adapters() if factor > 1 else self.net.enable_adapters()

    def adapter_added(self, factor):
        from peft import LoraConfig

        name = f"y{len(self.layers()[0].lora_A)}"
        self.net.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q"]), adapter_name=name)

    def hook_after(self, factor):
        hook = lambda module, args, output: output * factor  # noqa: E731
        self.hooks.append(self.block.ff.register_forward_hook(hook))

    def hook_before(self, factor):
        hook = lambda module, args: (args[0] * factor, *args[1:])  # noqa: E731
        self.hooks.append(self.net.proj_out.register_forward_pre_hook(hook, prepend=factor > 1))

    def hook_removed(self, factor):
        if self.hooks:
            self.hooks.pop().remove()

    def hook_with_a_strength(self, factor):
        strength = self.strength
        self.hooks.append(self.net.proj_out.register_forward_hook(lambda module, args, output: output * strength[0]))

    def hook_strength(self, factor):
        self.strength[0] = factor

    def attribute_number(self, factor):
        self.net.norm_out.norm.eps = 0.1 * factor

    def attribute_forward(self, factor):
        inner = self.block.ff.forward
        self.block.ff.forward = lambda *args, **kwargs: inner(*args, **kwargs) * factor

    def attribute_in_an_object(self, factor):
        self.block.attn.processor.strengths[0] = factor

    def attribute_object(self, factor):
        self.block.attn.processor = Scaled(self.block.attn.processor.inner)
        self.block.attn.processor.strengths = [factor]

    def dtype_of_all(self, factor):
        self.net.to(torch.float64 if factor > 1 else torch.float32)


KINDS = ("weight_", "adapter_", "hook_", "attribute_", "dtype_")
EDITS = [name for name in vars(Edited) if name.startswith(KINDS)]
# Refused with every configuration, and where ranks hold parts of the weights.
REFUSED = ("adapter_added",)
REFUSED_IN_PARTS = ("adapter_", "weight_", "dtype_")


def edited_model(edits):
    edited = Edited()
    for name, factor in edits:
        getattr(edited, name)(factor)
    return edited


@torch.no_grad()
def random_edits(followers, config, seed, count):
    """Number of edits that were refused; what was not is what one device gives."""
    random, refusable = np.random.default_rng(seed), REFUSED_IN_PARTS if "tensor" in config else REFUSED
    given, edits, refused = inputs("SD3", ODD), [], 0
    given["hidden_states"] = torch.from_numpy(random.standard_normal(given["hidden_states"].shape, np.float32))
    alone, edited = Edited(), Edited()
    followers.parallelize(edited.net, config)
    for _ in range(count):
        name, factor = str(random.choice(EDITS)), float(random.uniform(0.8, 1.25))
        edits.append((name, factor))
        getattr(alone, name)(factor)
        call_of_all = {
            key: value.to(alone.net.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in given.items()
        }
        refusal = None
        try:
            getattr(edited, name)(factor)
            output = edited.net(**call_of_all)[0]
        except ditmesh.InputError as error:
            refusal = error
        if refusal is not None:
            assert name.startswith(refusable), (config, seed, edits, refusal)
            refused += 1
            # The way out that the sentence tells. Parts in another dtype cannot be put together.
            with suppress(PeerError):
                ditmesh.restore(edited.net)
            edited = edited_model(edits)
            followers.parallelize(edited.net, config)
            output = edited.net(**call_of_all)[0]
        error = relative_error(output, alone.net(**call_of_all)[0])
        assert error <= 1e-5, (config, seed, edits, error)
    return refused


@torch.no_grad()
def test_parts_of_weights_that_were_changed_are_refused_for_good(followers):
    net, given = copy.deepcopy(tiny("SD3")), inputs("SD3", ODD)
    truth = net(**given)[0]
    followers.parallelize(net, {"tensor": 2})
    assert relative_error(net(**given)[0], truth) <= 1e-5
    net.transformer_blocks[0].ff.net[2].weight.data.mul_(2.0)
    for _ in range(2):
        with pytest.raises(ditmesh.InputError, match=r"ff.net.2.weight was changed .* load the model again"):
            net(**given)
    ditmesh.restore(net)
    with pytest.raises(ditmesh.InputError, match="load the model again"):
        net(**given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "config", [{"ulysses": 2}, pytest.param({"ring": 2}, marks=pytest.mark.matrix), {"tensor": 2}], ids=str
)
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 5), *(pytest.param(seed, 10, marks=pytest.mark.matrix) for seed in range(1, 11))]
)
def test_random_edits_between_calls_travel_or_are_refused(followers, config, seed, count):
    assert random_edits(followers, config, seed, count) < count
