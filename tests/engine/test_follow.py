"""Calls that rank 0 makes and the other ranks follow."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.engine.sent import CallReceiver, CallSender
from ditmesh.engine.targets import FOLLOWED
from engine.test_first_call import ForeignPipeline, call, model
from support.models import ODD, inputs, relative_error, tiny


class Faulty(Exception):
    """What a planted fault raises."""


def followed(config, name=None):
    """Rank 0's errors of three calls, and whether all is as it was; the others follow."""
    torch.manual_seed(0)
    net, given = (model(), call()) if name is None else (tiny(name), inputs(name, ODD))
    before, kind = set(vars(net)), type(net)
    with torch.no_grad():
        truth = [net(**given), net(**{**given, **_later(given)})]
        ditmesh.parallelize(net, config, follow=True)
        if dist.get_rank():
            ditmesh.follow(net)
            return None, set(vars(net)) == before and type(net) is kind, torch.equal(net(**given)[0], truth[0][0])
        lead = vars(net)[FOLLOWED].lead
        found, sent = [], []
        for one in (given, given, {**given, **_later(given)}):
            found.append(net(**one))
            sent.append(lead.sender.bytes_sent)
        ditmesh.restore(net)
        errors = [relative_error(a[0], b[0]) for a, b in zip(found, [truth[0], *truth], strict=True)]
        assert sent[1] == 0 < sent[2] < sent[0], sent
        return max(errors), set(vars(net)) == before and type(net) is kind, torch.equal(net(**given)[0], truth[0][0])


def _later(given):
    """Another value of the first tensor: the others stay."""
    name = next(key for key, value in given.items() if isinstance(value, torch.Tensor))
    return {name: given[name] * 0.5}


@pytest.mark.parametrize(
    ("config", "name"),
    [({"ulysses": 2}, None), ({"ring": 2}, "Flux"), ({"tensor": 2}, "SD3")],
)
def test_a_transformer_that_one_rank_calls(ranks, config, name):
    for error, restored, same in ranks(2).run(followed, config, name):
        assert error is None or error <= 1e-5
        assert restored
        assert same


def a_pipeline(config):
    pipe, words = ForeignPipeline(model()), torch.randn(1, 11, 10, generator=torch.Generator().manual_seed(1))
    own = torch.Generator().manual_seed(5)
    truth = [pipe(words, own), pipe(words, own)]
    before, kind = set(vars(pipe)), type(pipe)
    ditmesh.parallelize(pipe, config, follow=True)
    if dist.get_rank():
        ditmesh.follow(pipe)
        return 0.0, pipe.called, set(vars(pipe)) == before and type(pipe) is kind
    own = torch.Generator().manual_seed(5)
    found = [pipe(words, own), pipe(words, own)]
    ditmesh.restore(pipe)
    errors = [relative_error(one, other) for one, other in zip(found, truth, strict=True)]
    return max(errors), pipe.called, set(vars(pipe)) == before and type(pipe) is kind


def test_a_pipeline_that_one_rank_calls(ranks):
    for error, called, restored in ranks(2).run(a_pipeline, {"cfg": 2}):
        assert error <= 1e-5
        # Twice alone, then twice, the first of them again.
        assert called == 5
        assert restored


class Trapped(type(model())):
    def forward(self, picture, words, when, *, sharpness=None, trap=None):
        if trap is not None and dist.is_initialized() and dist.get_rank() == trap:
            raise Faulty(f"rank {trap} fails")
        return super().forward(picture, words, when, sharpness=sharpness)


def trapped(trap):
    torch.manual_seed(0)
    net, given = Trapped().eval(), call()
    with torch.no_grad():
        truth = net(**given)[0]
        ditmesh.parallelize(net, {"ulysses": 2}, follow=True)
        if dist.get_rank():
            ditmesh.follow(net)
            return None
        first = relative_error(net(**given, trap=-1)[0], truth)
        with pytest.raises(Faulty, match=f"rank {trap} fails"):
            net(**given, trap=trap)
        with pytest.raises(ditmesh.InputError, match=r"sharpness.*cannot be sent to the other ranks"):
            net(**given, sharpness=threading.Lock())
        after = relative_error(net(**given, trap=-1)[0], truth)
        # Written to where it is: sent again.
        given["picture"].mul_(0.5)
        changed = net(**given, trap=-1)[0]
        ditmesh.restore(net)
        return first, after, relative_error(changed, net(**given)[0])


@pytest.mark.parametrize("trap", [0, 1])
def test_an_error_on_one_rank_reaches_rank_0_and_the_next_call_runs(ranks, trap):
    errors, other = ranks(2).run(trapped, trap)
    assert other is None
    assert max(errors) <= 1e-5


class NoMesh:
    """What calls are sent over, without ranks."""

    device = torch.device("cpu")

    class world:  # noqa: N801
        @staticmethod
        def broadcast(message, source):
            NoMesh.message = message if NoMesh.sends else message.copy_(NoMesh.message)


def through(sender, receiver, value):
    content, tensors = sender.pack(value)
    NoMesh.sends = True
    sender.send(tensors)
    NoMesh.sends = False
    return receiver.take(content)


@pytest.mark.parametrize("inference", [False, True])
def test_what_arrives_is_what_was_sent(inference):
    sender, receiver = CallSender(NoMesh), CallReceiver(NoMesh)
    with torch.inference_mode(inference):
        kinds = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
        value = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
        value |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "turned": torch.randn(4, 3).T, "text": "x"}
        value["twice"] = [value["scalar"], value["turned"]]
        function = lambda number: number + 1  # noqa: E731
        value["function"] = function
        for _ in range(2):
            got = through(sender, receiver, value)
            assert got["function"](1) == 2
            assert got["text"] == "x"
            assert got["twice"][0] is got["scalar"]
            for name, one in value.items():
                if isinstance(one, torch.Tensor):
                    assert got[name].dtype == one.dtype
                    assert torch.equal(
                        got[name].float() if "8" in name else got[name], one.float() if "8" in name else one
                    )
        assert sender.bytes_sent == 0
        # What a model writes to there is not what is kept.
        got["turned"].zero_()
        assert torch.equal(through(sender, receiver, value)["turned"], value["turned"])
        value["turned"].add_(1)
        got = through(sender, receiver, value)
        assert torch.equal(got["turned"], value["turned"])
        assert sender.bytes_sent > 0
        generator = torch.Generator().manual_seed(4)
        mine, theirs = (
            torch.rand(3, generator=generator.clone_state()),
            through(sender, receiver, {"g": generator})["g"],
        )
        assert torch.equal(torch.rand(3, generator=theirs), mine)
