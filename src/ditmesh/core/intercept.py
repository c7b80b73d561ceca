"""Interception of attention: one function through which every softmax attention of diffusers passes.

diffusers reaches attention in two ways, its dispatcher and the older processors. The processors and the dispatcher's
default backend, ``native``, end in ``torch.nn.functional.scaled_dot_product_attention``; every other backend
(``flash``, ``sage``, ``flex`` …) is a function in the dispatcher's registry. While at least one model is parallelised
these functions are replaced by thin ones which ask whether the calling thread is inside a block with a handler;
everyone else (VAE, text encoders, other models, other threads) gets the originals.

This module holds the only process-wide state of ditmesh, because the functions it stands in for are
process-wide: how many models are intercepted and, per thread of execution, the handler in charge. When the last one is
restored, the original function objects are back in their places.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..errors import LayoutError


class AttentionHandler(Protocol):
    """Computes attention inside a block. Shapes: q (B, H, Sq, D), k and v (B, H, Sk, D).

    Where it has a true attribute ``takes_key_heads``, keys and values of grouped queries come with their fewer heads;
    with ``takes_block_masks`` a mask may be torch's `BlockMask`.
    """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, backend: str | None = None
    ) -> Tensor:
        """The attention output (B, H, Sq, D).

        Args:
            mask: as SDPA takes it: boolean (True = attend) or additive.
            backend: the attention backend of diffusers that the model has called; None (which may be left out): SDPA.
        """
        ...

    def left_out(self) -> None:
        """Another library's function mode answered a call, without attention (guidance by perturbed attention)."""


# The attention of torch itself, whatever stands in its place, now or when this module was imported.
sdpa: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention  # type: ignore[attr-defined]

_handler: ContextVar[AttentionHandler | None] = ContextVar("ditmesh_attention_handler", default=None)
# While a function mode may answer in the handler's place: whether the handler was asked. Else None.
_asked: ContextVar[bool | None] = ContextVar("ditmesh_attention_asked", default=None)
_lock = threading.Lock()
_users = 0


class _Interceptor:
    """Stands in for torch's function. Taken off while another replacement stands around it, it only passes calls on."""

    def __init__(self) -> None:
        self.original: Any = F.scaled_dot_product_attention
        self.active = True

        def scaled_dot_product_attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            if torch.compiler.is_compiling():
                # A compiled block must not trace who handles it, which changes from call to call: it asks when it runs.
                return torch.ops.ditmesh.attend(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, None
                )
            handler = _handler.get() if self.active else None
            if has_torch_function_unary(query):
                # A mode sees this function as it would see the one that this stands in for.
                return self._through_modes(
                    handler, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            if handler is not None:
                return _handled(handler, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return self.original(
                query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )

        self._function = scaled_dot_product_attention
        F.scaled_dot_product_attention = self._function  # type: ignore[assignment]
        # The backend "native" calls the function above.
        self.backends = {name: found for name, found in _registry().items() if name != "native"}
        self._stand_ins = {name: self._backend(str(name.value), found) for name, found in self.backends.items()}
        _registry().update(self._stand_ins)

    def _backend(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stands in for a backend in the registry of diffusers, which calls it with keywords, tensors (B, S, H, D)."""

        def attend(**call: Any) -> Any:
            compiling = torch.compiler.is_compiling()
            handler = _handler.get() if self.active and not compiling else None
            if (mask := call.get("attn_mask")) is not None and not isinstance(mask, Tensor):
                _check_shares(getattr(mask, "shape", ())[:-2], call["query"])
                if (unobserved := getattr(handler, "call_unobserved", None)) is not None:
                    # A module with what is not to be noted counts as any other module that mixes tokens.
                    return unobserved(lambda: original(**call))
            if handler is None and not compiling:
                return original(**call)
            taken = {name: call.pop(name, default) for name, default in _TAKEN.items()}
            q, k, v = (call.pop(name).transpose(1, 2) for name in ("query", "key", "value"))
            if further := [name for name, value in call.items() if value is not None and value is not False]:
                raise LayoutError(
                    f"attention with {', '.join(map(repr, further))} of the backend {name!r} inside a parallel block "
                    "is not supported; run this model on one device"
                )
            # Many backends take fewer heads of keys without being asked.
            taken["enable_gqa"] = k.shape[1] != q.shape[1]
            if handler is None:
                return torch.ops.ditmesh.attend(q, k, v, *taken.values(), name).transpose(1, 2)
            return _handled(handler, q, k, v, **taken, backend=name).transpose(1, 2)

        return attend

    def _through_modes(self, handler: AttentionHandler | None, *call: Any, **more: Any) -> Tensor:
        """The call as a function mode answers it; the modes inside of it, and the handler, are asked if it asks on."""
        token = _asked.set(False)
        try:
            out = handle_torch_function(self._function, call[:3], *call, **more)
            asked = _asked.get()
        finally:
            _asked.reset(token)
        if asked:
            _note_asked()
        elif handler is not None:
            handler.left_out()
        return out

    def remove(self) -> None:
        self.active = False
        # A plug-in may have replaced the function meanwhile, and may call this one: then it stays where it is.
        if F.scaled_dot_product_attention is self._function:
            F.scaled_dot_product_attention = self.original
        registry = _registry()
        for name, stand_in in self._stand_ins.items():
            if registry.get(name) is stand_in:
                registry[name] = self.backends[name]


# Arguments of a backend besides the tensors, in the order of SDPA.
_TAKEN: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def _registry() -> dict[Any, Callable[..., Any]]:
    """Functions of diffusers' attention backends, by name."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _AttentionBackendRegistry._backends


_interceptor: _Interceptor | None = None


def set_handler(handler: AttentionHandler | None) -> None:
    """Hand this thread's attention calls to ``handler`` from now on; None: to the original function."""
    _handler.set(handler)


def install() -> None:
    """Intercept attention, unless it is intercepted already. Every call is undone by one `uninstall`."""
    global _users, _interceptor
    with _lock:
        if _users == 0:
            _interceptor = _Interceptor()
        _users += 1


def uninstall() -> None:
    """Undo one `install`; the last one puts the replaced function back."""
    global _users, _interceptor
    with _lock:
        _users -= 1
        if _users == 0 and _interceptor is not None:
            _interceptor.remove()
            _interceptor = None


def is_handled() -> bool:
    """True if attention in this thread goes to a handler: the thread is inside a block that has one."""
    return _handler.get() is not None


@contextmanager
def handled_by(handler: AttentionHandler | None) -> Iterator[None]:
    """Attention is intercepted, and this thread's calls go to ``handler``; None: to the original function."""
    install()
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)
        uninstall()


def original_attention() -> Callable[..., Tensor]:
    """The attention function in force outside of blocks: torch's own, or what a plug-in has put in its place."""
    return F.scaled_dot_product_attention if _interceptor is None else _interceptor.original


def backend_function(name: str) -> Callable[..., Any]:
    """The function of an attention backend of diffusers that is in force outside of blocks."""
    return (_registry() if _interceptor is None else {**_registry(), **_interceptor.backends})[name]


def call_backend(name: str, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, **given: Any) -> Any:
    """Call an attention backend of diffusers as diffusers' dispatcher does.

    Args:
        q_bhsd, k_bhsd, v_bhsd: (B, H, Sq, D), (B, H, Sk, D), (B, H, Sk, D); the backend gets them as (B, S, H, D).
        given: further arguments; those that the backend does not have are left out, but for a scale that counts.

    `LayoutError`: it has one scale only, and another is given.

    Returns the output (B, H, Sq, D); if the backend returns more, a tuple of the output and the rest as it is.
    """
    function = backend_function(name)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_bhsd, k_bhsd, v_bhsd))
    parameters = inspect.signature(function).parameters
    scale = given.get("scale")
    if "scale" not in parameters and scale not in (None, q_bhsd.shape[-1] ** -0.5):
        raise LayoutError(
            f"the attention backend {name!r} takes no other scale of the scores than 1/sqrt({q_bhsd.shape[-1]}), and "
            f"{scale} is asked for; use attention='native'"
        )
    with unhandled():
        out = function(query=q, key=k, value=v, **{key: value for key, value in given.items() if key in parameters})
    return (out[0].transpose(1, 2), *out[1:]) if isinstance(out, tuple) else out.transpose(1, 2)


@contextmanager
def unhandled() -> Iterator[None]:
    """This thread's attention calls go to the original function: for a handler that calls what calls attention."""
    token = _handler.set(None)
    try:
        yield
    finally:
        _handler.reset(token)


def _note_asked() -> None:
    if _asked.get() is False:
        _asked.set(True)


def with_all_heads(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries have: those of grouped queries are repeated."""
    groups = q_bhsd.shape[1] // k_bhsd.shape[1]
    if groups == 1:
        return k_bhsd, v_bhsd
    return k_bhsd.repeat_interleave(groups, dim=1), v_bhsd.repeat_interleave(groups, dim=1)


def _check_shares(given: tuple[int, ...], q_bshd: Tensor) -> None:
    """Refuse a block mask of other samples or heads than the queries: eager flex attention would take the first."""
    samples, _, heads, _ = q_bshd.shape
    if len(given) == 2 and (given[0] not in (1, samples) or given[1] not in (1, heads)):
        raise LayoutError(
            f"attention of {samples} samples and {heads} heads on a rank is given a BlockMask of {given[0]} samples "
            f"and {given[1]} heads; leave data, cfg and tensor out for this model"
        )


def _handled(
    handler: AttentionHandler,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    backend: str | None = None,
) -> Tensor:
    _note_asked()
    by_pairs = attn_mask is None or isinstance(attn_mask, Tensor)
    if not by_pairs and not getattr(handler, "takes_block_masks", False):
        raise LayoutError(
            f"attention with a mask of type {type(attn_mask).__name__} (backend {backend!r}) is not supported with "
            "pipe, patches, reproducible=True or stale keys; use ulysses, or ring with exchange='gather'"
        )
    if dropout_p:
        raise LayoutError(
            f"attention with dropout_p={dropout_p} inside a parallel block is not supported; run this model on one "
            "device"
        )
    if query.dim() != 4:
        raise LayoutError(
            f"attention of {query.dim()}-dimensional queries inside a parallel block; expected (B, H, S, D)"
        )
    if enable_gqa and not getattr(handler, "takes_key_heads", False):
        key, value = with_all_heads(query, key, value)
    if is_causal and by_pairs:
        # A mask as any other: who cuts tokens sees whether it can be cut.
        attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if torch.is_autocast_enabled(query.device.type):
        # As autocast does with the arguments of torch's function, which all ranks' exchanges come before.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if backend is None:
        return handler.attend(query, key, value, attn_mask, scale)
    if isinstance(attn_mask, Tensor) and attn_mask.dim() == 2 and attn_mask.shape == (key.shape[0], key.shape[2]):
        # Where SDPA has (queries, keys), diffusers' backends take a mask of keys for every sample.
        attn_mask = attn_mask[:, None, None]
    return handler.attend(query, key, value, attn_mask, scale, backend)


# The operator's Python has to run at every call: who handles it, and what ranks send. A CUDA graph that recorded it
# would replay its kernels alone: by the tag torch cuts its graphs there.
@torch.library.custom_op(
    "ditmesh::attend",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, "
    "float? scale, bool enable_gqa, str? backend) -> Tensor",
)
def _attend_op(*call: Any) -> Tensor:
    handler = _handler.get()
    query, key, value, *rest, backend = call
    if handler is not None:
        out = _handled(handler, *call)
    elif backend is None:
        out = original_attention()(query, key, value, **dict(zip(_TAKEN, rest, strict=True)))
    else:
        out = call_backend(backend, query, key, value, **dict(zip(_TAKEN, rest, strict=True)))
    # One memory order on every path: the compiler plans for the one `_attend_shape` declares.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.clone() if out.data_ptr() in (query.data_ptr(), value.data_ptr()) else out


@_attend_op.register_fake
def _attend_shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, length = query.shape[:3]
    return query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
