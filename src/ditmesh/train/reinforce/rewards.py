"""Rewards of images: a user's functions, built-in ones and servers, each called with a time limit."""

from __future__ import annotations

import base64
import inspect
import reprlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from ...errors import ConfigError, DitmeshError, InputError, did_you_mean, shortened
from ...requirements import not_installed
from ..settings import RewardConfig
from .builtin import REWARDS, encoded

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
    """The rewards of a run. `ConfigError`: two have one name, or a function or server cannot be called."""

    def __init__(self, rewards: tuple[RewardConfig, ...]) -> None:
        self._rewards: dict[str, _Reward] = {}
        for reward in map(_Reward, rewards):
            if reward.name in self._rewards:
                raise ConfigError(f"two rewards have the name {reward.name!r}; give one of them another name")
            self._rewards[reward.name] = reward

    def __call__(self, images: np.ndarray, prompts: list[str]) -> dict[str, np.ndarray]:
        """The scores (B,) of images (B, H, W, 3) or videos (B, F, H, W, 3), ``uint8``, by name; or `RewardError`."""
        return {name: reward(images, prompts) if prompts else np.zeros(0) for name, reward in self._rewards.items()}

    def total(self, scores: Mapping[str, np.ndarray]) -> np.ndarray:
        """The weighted sum of scores."""
        return np.sum([each.config.weight * scores[name] for name, each in self._rewards.items()], axis=0)


class _Reward:
    """One reward. Python cannot end the thread of a late call: it goes on until it returns or the process ends, and no
    other call begins before. C code that keeps Python's lock stops the process, the time limit included."""

    def __init__(self, config: RewardConfig) -> None:
        self.config, url = config, urlsplit(config.function)
        is_url = url.scheme in ("http", "https")
        address = url.netloc.rpartition("@")[2] + url.path  # Without a password.
        self.name = config.name or (address if is_url else config.function.rpartition(":")[2])
        self._function = _served(self.name, config) if is_url else _function_of(config)
        self._last: Future[np.ndarray] | None = None

    def __call__(self, images: np.ndarray, prompts: list[str]) -> np.ndarray:
        limit, batch = f"timeout_seconds={self.config.timeout_seconds:g}", f"{len(prompts)} images"
        if self._last is not None and not self._last.done():
            raise RewardError(self.name, f"still runs a call that was late at {limit}; raise it, or mend the reward")
        self._last = call = Future()
        # A function may write into images, and a late one goes on reading them. A thread begins on the first device.
        images = images.copy()
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def work() -> None:
            try:
                with torch.accelerator.device_index(device), torch.no_grad():
                    result = self._function(images, [*prompts], **self.config.arguments)
                    call.set_result(_as_scores(self.name, result, prompts))
            except RewardError as error:
                call.set_exception(error)
            except BaseException as error:
                what = f"raised {shortened(error, with_kind=True)} for {batch}; mend the function, or let it return 0"
                what = f"cannot rate {batch}: {error}" if isinstance(error, InputError) else what
                call.set_exception(RewardError(self.name, what).with_traceback(error.__traceback__))

        threading.Thread(target=work, name=f"ditmesh-reward-{self.name}", daemon=True).start()
        try:
            return call.result(self.config.timeout_seconds)
        except TimeoutError:
            what = f"did not return within {limit} for {batch}; raise it, or mend the reward"
            raise RewardError(self.name, f"{what} (its thread goes on until it returns or the process ends)") from None


def _function_of(config: RewardConfig) -> Callable[..., Any]:
    where, (module, colon, name) = f"reward {config.function!r}", config.function.partition(":")
    if not colon and module not in REWARDS:
        near = did_you_mean(module, REWARDS)
        raise ConfigError(f"{where} is not built in; use {', '.join(REWARDS)}, module:function or a URL{near}")
    try:
        function = getattr(import_module(module), name) if colon else REWARDS[module]
        signature = inspect.signature(function)
    except Exception as error:
        what = f"{where} is no function that can be imported ({shortened(error, with_kind=True)})"
        raise ConfigError(f"{what}; mend {module!r}, put its folder on PYTHONPATH, or name another function") from error
    try:
        signature.bind(None, None, **config.arguments)
        if not colon:  # What values its arguments may have is seen by a call.
            function(np.zeros((1, 8, 8, 3), np.uint8), ["red"], **config.arguments)
    except (TypeError, ValueError) as error:
        what = f"{where} does not take arguments={reprlib.repr(config.arguments)}: {error}"
        raise ConfigError(f"{what}; its arguments are {', '.join(signature.parameters)}") from None
    return function


def _as_scores(name: str, result: Any, prompts: list[str]) -> np.ndarray:
    count = len(prompts)
    if isinstance(result, (list, tuple)):
        result = [number.item() if isinstance(number, torch.Tensor) else number for number in result]
    elif isinstance(result, torch.Tensor):
        # NumPy has no bfloat16.
        result = (result.double() if result.is_floating_point() else result).detach().cpu().numpy()
    scores = np.asarray(result)
    if scores.dtype.kind not in "biuf" or scores.shape != (count,):
        what = f"numbers of shape {scores.shape}" if scores.dtype.kind in "biuf" else reprlib.repr(result)
        raise RewardError(name, f"returned {what} for {count} images; let it return a list or tensor of {count}")
    scores = scores.astype(np.float64)
    if len(wrong := np.flatnonzero(~np.isfinite(scores))):
        what = f"returned {scores[wrong[0]]} for the prompt {prompts[wrong[0]][:100]!r}"
        raise RewardError(name, f"{what} and {len(wrong) - 1} others of {count}; let it return finite numbers there")
    return scores


def _served(name: str, config: RewardConfig) -> Callable[..., Any]:
    try:
        import httpx

        if not httpx.Request("POST", config.function, json=config.arguments).url.host:
            raise ValueError("its URL has no host")
    except ModuleNotFoundError as error:
        raise ConfigError(not_installed(f"the reward {name!r}", str(error.name), "serve")) from None
    except Exception as error:
        what = f"the reward {name!r} cannot be asked for ({error})"
        raise ConfigError(f"{what}; give a URL such as http://127.0.0.1:9000/, and arguments that are JSON") from None

    def png(image: np.ndarray) -> str | list[Any]:
        if image.ndim > 3:
            return [png(frame) for frame in image]
        return base64.b64encode(encoded(image, "PNG", compress_level=1)).decode()

    def ask(images: np.ndarray, prompts: list[str], **arguments: Any) -> Any:
        body, problem = {"prompts": prompts, "images": png(images), "arguments": arguments}, ""
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE * attempt)
            try:
                # The thread's limit is the shorter one; the thread ends soon after it.
                response = httpx.post(config.function, json=body, timeout=config.timeout_seconds + 1.0)
            except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                problem = f"has no connection to its server in {attempt + 1} attempts ({shortened(error)})"
                continue
            if response.is_success:
                with suppress(ValueError, KeyError, TypeError):
                    return response.json()["scores"]
            problem = f"has HTTP status {response.status_code} in attempt {attempt + 1}, answer {response.text[:100]!r}"
            if response.status_code < 500:
                break
        raise RewardError(name, f'{problem}; see that its server runs and answers with {{"scores": [...]}}')

    return ask
