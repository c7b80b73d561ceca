"""Rewards of reinforcement learning: built-in ones, a user's functions and servers, and what they get wrong."""

from __future__ import annotations

import json
import runpy
import sys
import threading
import types
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from ditmesh.errors import ConfigError
from ditmesh.lab.study.references import read_sheet
from ditmesh.train.reinforce.rewards import RewardError, Rewards
from ditmesh.train.settings import RewardConfig
from support.train import ZOO, emoji

EXAMPLES = ZOO.parents[2] / "examples"
NOISE = np.random.default_rng(0).integers(0, 256, (2, 24, 24, 3)).astype(np.uint8)
PROMPTS = ["a red fox", "a blue fox"]


def one(function: str | Callable[..., Any], **settings: Any) -> Callable[..., np.ndarray]:
    sys.modules["given"] = types.SimpleNamespace(rate=function)  # type: ignore[assignment]
    rewards = Rewards((RewardConfig(function="given:rate" if callable(function) else function, name="it", **settings),))
    del sys.modules["given"]
    return lambda images=NOISE, prompts=PROMPTS: rewards(images, prompts)["it"]


def test_built_in_rewards_rate_images_as_their_docstrings_say():
    fox = np.full((2, 24, 24, 3), 255, np.uint8)
    fox[:, 8:16, 8:16] = (255, 0, 0)
    assert all(one("jpeg_size")(fox) - one("jpeg_size")() > 0.01)
    assert np.array_equal(one("jpeg_size", arguments={"compressible": False})(), -one("jpeg_size")())
    assert one("colour")(fox) == pytest.approx([1.0, 1.0 - (2 / 3) ** 0.5], abs=1e-3)
    assert one("colour", arguments={"colour": "red"})(fox, ["blue", ""]) == pytest.approx(1.0, abs=1e-3)
    for name in ("jpeg_size", "colour"):
        alone = [one(name)(NOISE[i : i + 1], [PROMPTS[i]])[0] for i in range(2)]
        assert one(name)().tolist() == alone
        assert one(name)(np.stack([NOISE, NOISE], axis=1)) == pytest.approx(alone, rel=1e-12)
        assert one(name)(NOISE[:0], []).shape == (0,)


def test_the_total_is_the_weighted_sum_and_what_a_function_writes_stays_its_own():
    def rate(images: np.ndarray, prompts: list[str], factor: float) -> torch.Tensor:
        images[:] = 0
        prompts.clear()
        return torch.tensor([factor, 2 * factor], dtype=torch.bfloat16)

    assert one(rate, arguments={"factor": 3})().tolist() == [3.0, 6.0]
    assert NOISE.any()
    two = Rewards((RewardConfig(function="colour", weight=0.5), RewardConfig(function="jpeg_size", weight=-2)))
    assert two.total({"colour": np.array([1.0, 2.0]), "jpeg_size": np.array([3.0, 4.0])}).tolist() == [-5.5, -7.0]


def test_what_cannot_be_called_is_refused_before_the_run():
    for function, arguments, sentence in (
        ("jpeg_siz", {}, "reward 'jpeg_siz' is not built in; use .*did you mean 'jpeg_size'"),
        ("given_:rate", {}, "No module named 'given_'.*PYTHONPATH"),
        ("colour", {"color": "red"}, "argument 'color'; its arguments are .*colour"),
        ("colour", {"colour": "bleu"}, "colour='bleu' .*did you mean 'blue'"),
        ("http:///rate", {}, "no host.*give a URL such as"),
        ("http://u:secret@h/rate", {"at": float("nan")}, "^the reward 'h/rate' .*JSON"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Rewards((RewardConfig(function=function, arguments=arguments),))
    with pytest.raises(ConfigError, match="two rewards have the name 'colour'; give one of them another"):
        Rewards((RewardConfig(function="colour"),) * 2)


def test_a_reward_without_finite_numbers_in_time_is_an_error_that_names_it():
    for result, sentence in (
        (lambda: [0.0, float("nan")], "returned nan for the prompt 'a blue fox' and 0 others of 2; let it"),
        (lambda: torch.zeros(2, 1), r"returned numbers of shape \(2, 1\) for 2 images; let it return"),
        (lambda: 1 / 0, "raised ZeroDivisionError: .* for 2 images; mend the function"),
    ):
        with pytest.raises(RewardError, match=f"^the reward 'it' {sentence}"):
            one(lambda images, prompts, result=result: result())()
    with pytest.raises(RewardError, match=r"prompt 'a fox' names no colour of red, .*give arguments: {colour: red}$"):
        one("colour")(NOISE, ["a red fox", "a fox"])
    go_on = threading.Event()
    hangs = one(lambda images, prompts: go_on.wait() or [0.0, 0.0], timeout_seconds=0.05)
    for sentence in (r"did not return within timeout_seconds=0\.05 for 2 images; raise", "still runs a call"):
        with pytest.raises(RewardError, match=sentence):
            hangs()
    go_on.set()


def test_a_server_is_asked_again_where_that_may_help(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ditmesh.train.reinforce.rewards.PAUSE", 0.0)
    answers, asked, end, example = [], [], threading.Event(), runpy.run_path(str(EXAMPLES / "reward_server.py"))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answers.pop(0) if answers else (end.wait() and 500, "")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}/rate"
        for images in (NOISE, np.stack([NOISE, NOISE], axis=1)):
            answers += [(500, "busy"), (200, '{"scores": [1, 2.5]}')]
            assert one(url)(images).tolist() == [1.0, 2.5]
            rated = example["rate"](example["Batch"](**asked[-1]))
            assert rated["scores"] == pytest.approx(1.0 - NOISE.mean(axis=(1, 2, 3)) / 255.0, rel=1e-12)
        for script, sentence in (
            ([(503, "busy")] * 3, "has HTTP status 503 in attempt 3, answer 'busy'; see that its server runs"),
            ([(400, "no fox")], "has HTTP status 400 in attempt 1, answer 'no fox'"),
            ([(200, "<html>")], r"has HTTP status 200 in attempt 1, answer '<html>'; .*{\"scores\": \[...\]}"),
            ([(200, '{"scores": [1, NaN]}')], "returned nan for the prompt 'a blue fox'"),
            ([], r"did not return within timeout_seconds=0\.2"),
        ):
            answers[:], asked[:] = script, []
            with pytest.raises(RewardError, match=f"the reward 'it' {sentence}"):
                one(url, timeout_seconds=60 if script else 0.2)()
            assert len(asked) == len(script) or not script
        end.set()
        http.shutdown()
    with pytest.raises(RewardError, match=r"has no connection to its server in 3 attempts \(.*refused"):
        one(url)()


def test_the_example_of_a_classifier_rates_the_right_emoji_highest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names, before = [name for name, _ in emoji(256)][::32], torch.get_rng_state()
    generated = read_sheet(ZOO / "emoji-sd3" / "samples.png", 256, 64)[::32]
    scores = np.stack([one("reward_emoji:reward")(generated, [name] * 8) for name in names])
    assert scores.argmax(axis=0).tolist() == scores.argmax(axis=1).tolist() == [*range(8)]
    assert torch.equal(*(sys.modules["reward_emoji"].classifier.__wrapped__(steps=2)[-1].weight for _ in range(2)))
    assert torch.equal(torch.get_rng_state(), before)
