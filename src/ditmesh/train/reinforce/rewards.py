"""Rewards of images: a user's functions, built-in ones and servers, each called with a time limit."""

from __future__ import annotations

import base64
import inspect
import json
import reprlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

from ...errors import ConfigError, DitmeshError, InputError, did_you_mean, shortened
from ...requirements import not_installed
from ..settings import RewardConfig
from .builtin import REWARDS

# Requests to a server that is not reached or answers with a status of 500 or above; seconds before the second one.
ATTEMPTS, PAUSE = 3, 1.0


class RewardError(DitmeshError, RuntimeError):
    """A reward has no finite number for every image; ``name``: the reward's."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(name, sentence)
        self.name, self.sentence = name, sentence

    def __str__(self) -> str:
        return f"the reward {self.name!r} {self.sentence}"


class Rewards:
    """The rewards of a run.

    Raises `ConfigError`: there is none, two have one name, or a function or server cannot be called as configured.
    """

    def __init__(self, rewards: tuple[RewardConfig, ...]) -> None:
        if not rewards:
            raise ConfigError("rewards is empty; give a list with a reward, such as [{function: sharpness}]")
        self._rewards: dict[str, _Reward] = {}
        for reward in map(_Reward, rewards):
            if reward.name in self._rewards:
                raise ConfigError(f"two rewards have the name {reward.name!r}; give one of them another name")
            self._rewards[reward.name] = reward

    def __call__(self, images: np.ndarray, prompts: list[str]) -> dict[str, np.ndarray]:
        """The scores (B,) of images (B, H, W, 3) or videos (B, F, H, W, 3), ``uint8``, by the rewards' names.

        Raises `RewardError`: a reward fails, is late, or has no finite number for each.
        """
        return {name: reward(images, prompts) if prompts else np.zeros(0) for name, reward in self._rewards.items()}

    def total(self, scores: Mapping[str, np.ndarray]) -> np.ndarray:
        """The weighted sum of scores."""
        return np.sum([reward.config.weight * scores[name] for name, reward in self._rewards.items()], axis=0)


class _Reward:
    """One reward. Each call runs in a thread, which is left alone when it is late, since Python cannot end it.

    The thread keeps what it holds until it returns or the process ends, and until then no other call begins. Code in C
    that does not release Python's lock stops the whole process: no time limit is noticed.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config, url = config, urlsplit(config.function)
        is_url = url.scheme in ("http", "https")
        # An address may contain a password.
        name = url.netloc.rpartition("@")[2] + url.path if is_url else config.function.rpartition(":")[2]
        self.name = config.name or name
        self._function = _served(self.name, config) if is_url else _function_of(config)
        self._late: threading.Thread | None = None

    def __call__(self, images: np.ndarray, prompts: list[str]) -> np.ndarray:
        limit, batch = f"timeout_seconds={self.config.timeout_seconds:g}", f"{len(prompts)} images"
        if self._late is not None and self._late.is_alive():
            raise RewardError(self.name, f"still runs a call that was late at {limit}; raise it, or mend the function")
        outcome: list[np.ndarray | RewardError] = []
        # A function may write into its images, and a late one goes on reading them.
        images, prompts = images.copy(), list(prompts)
        # A thread begins on the first device.
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        @torch.no_grad()
        def work() -> None:
            try:
                if device is not None:
                    torch.accelerator.set_device_index(device)
                result = self._function(images, prompts, **self.config.arguments)
                outcome.append(_as_scores(self.name, result, prompts))
            except RewardError as error:
                outcome.append(error)
            except BaseException as error:
                what = f"raised {shortened(error, with_kind=True)} for {batch}; mend the function, or let it return 0"
                what = f"cannot rate {batch}: {error}" if isinstance(error, InputError) else what
                outcome.append(RewardError(self.name, what).with_traceback(error.__traceback__))

        thread = threading.Thread(target=work, name=f"ditmesh-reward-{self.name}", daemon=True)
        thread.start()
        thread.join(self.config.timeout_seconds)
        if not outcome:
            self._late = thread
            what = f"did not return within {limit} for {batch}; raise it, or mend the function"
            raise RewardError(self.name, f"{what} (its thread goes on until it returns or the process ends)")
        if isinstance(outcome[0], RewardError):
            raise outcome[0]
        return outcome[0]


def _function_of(config: RewardConfig) -> Callable[..., Any]:
    """The function of an import path or of a built-in reward."""
    where, (module, colon, name) = f"reward {config.function!r}", config.function.partition(":")
    if not colon and module not in REWARDS:
        near = did_you_mean(module, REWARDS)
        raise ConfigError(f"{where} is not built in; use {', '.join(REWARDS)}, module:function or a URL{near}")
    try:
        function = getattr(import_module(module), name, None) if colon else REWARDS[module]
    except Exception as error:
        what = f"{where}: {module!r} cannot be imported ({shortened(error, with_kind=True)})"
        raise ConfigError(f"{what}; mend it, or put its folder on PYTHONPATH") from error
    if not callable(function):
        what = f"{where}: {name!r} of {module!r} is {reprlib.repr(function)}"
        raise ConfigError(f"{what}, which cannot be called; give the name of a function as module:function")
    try:
        inspect.signature(function).bind(None, None, **config.arguments)
        if not colon:
            # What values its arguments may have is seen by a call.
            function(np.zeros((1, 8, 8, 3), np.uint8), ["red"], **config.arguments)
    except (TypeError, ValueError) as error:
        what = f"{where} does not take arguments={reprlib.repr(config.arguments)} ({error})"
        raise ConfigError(f"{what}; it is called as reward(images, prompts, **arguments)") from None
    return function


def _as_scores(name: str, result: Any, prompts: list[str]) -> np.ndarray:
    """What a function returned, as finite numbers (B,)."""
    count = len(prompts)
    if isinstance(result, (list, tuple)):
        result = [number.item() if isinstance(number, torch.Tensor) else number for number in result]
    elif isinstance(result, torch.Tensor):
        # NumPy has no bfloat16.
        result = (result.double() if result.is_floating_point() else result).cpu().numpy()
    scores = np.asarray(result)
    if scores.dtype.kind not in "biuf" or scores.shape != (count,):
        what = f"numbers of shape {scores.shape}" if scores.dtype.kind in "biuf" else reprlib.repr(result)
        raise RewardError(name, f"returned {what} for {count} images; let it return a list or tensor of {count}")
    scores = scores.astype(np.float64)
    if len(wrong := np.flatnonzero(~np.isfinite(scores))):
        what = f"returned {scores[wrong[0]]} for the prompt {prompts[wrong[0]][:100]!r}"
        raise RewardError(name, f"{what} and {len(wrong) - 1} others of {count}; let it return finite numbers there")
    return scores


def _png(image: np.ndarray) -> str | list[Any]:
    """An image as a PNG in base64, a video as a list of them."""
    if image.ndim == 4:
        return [_png(frame) for frame in image]
    file = BytesIO()
    Image.fromarray(image).save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def _served(name: str, config: RewardConfig) -> Callable[..., Any]:
    """The function that asks a server."""
    try:
        import httpx

        if not httpx.URL(config.function).host:
            raise ValueError("the URL has no host")
        json.dumps(config.arguments, allow_nan=False)
    except ModuleNotFoundError as error:
        raise ConfigError(not_installed(f"the reward {name!r}", str(error.name), "serve")) from None
    except Exception as error:
        what = f"the reward {name!r} cannot be asked for ({error})"
        raise ConfigError(f"{what}; give a URL such as http://127.0.0.1:9000/, and arguments that are JSON") from None

    def ask(images: np.ndarray, prompts: list[str], **arguments: Any) -> Any:
        body, problem = {"prompts": prompts, "images": [_png(image) for image in images], "arguments": arguments}, ""
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE * attempt)
            try:
                # The thread's limit is the shorter one; the thread ends soon after it.
                response = httpx.post(config.function, json=body, timeout=config.timeout_seconds + 1.0)
            except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                problem = f"has no connection to its server in {attempt + 1} attempts ({shortened(error)})"
                continue
            problem = f"has HTTP status {response.status_code} in attempt {attempt + 1}: {response.text[:100]!r}"
            if response.is_success:
                with suppress(ValueError, KeyError, TypeError):
                    return response.json()["scores"]
                problem = f'has the answer {response.text[:100]!r} and not {{"scores": [...]}}'
            if response.status_code < 500:
                break
        raise RewardError(name, f"{problem}; mend its server, or see that it runs at the address")

    return ask
