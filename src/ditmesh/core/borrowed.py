"""Names of other libraries that are private there, or promised by nobody, and that ditmesh relies on.

A library may rename each of them in any version. What is missing is said in one sentence when a pipeline is made
parallel, before anything has run, and on every rank; tests delete each name, and find names that are not listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from operator import attrgetter
from typing import Any, NamedTuple

from ..errors import ConfigError

# Versions in which all names were seen: those of constraints.txt.
TESTED = {
    "accelerate": "1.15.0",
    "diffusers": "0.42.1",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}


class Borrowed(NamedTuple):
    """Names that belong to one object, and what ditmesh does with them.

    Attributes:
        owner: module, and behind a colon the object in it, if it is not the module itself; of an object with ``()`` its
            instances have the names. A function has the names that its code uses.
        names: of attributes.
        use: what ditmesh does with them.
    """

    owner: str
    names: tuple[str, ...]
    use: str


BORROWED = (
    Borrowed(
        "torch.utils._pytree",
        ("tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_map_only", "tree_map_with_path"),
        "find the tensors in nested arguments and results",
    ),
    Borrowed("torch.utils._pytree", ("tree_unflatten",), "put tensors back into nested arguments and results"),
    Borrowed(
        "torch.utils._python_dispatch",
        ("TorchDispatchMode", "_disable_current_modes", "_get_current_dispatch_mode"),
        "watch operators in the run that finds a layout",
    ),
    Borrowed("torch.utils._python_dispatch", ("is_traceable_wrapper_subclass",), "tell tensors that consist of others"),
    Borrowed("torch._subclasses.fake_tensor", ("FakeTensor", "FakeTensorMode"), "run a model on shapes alone"),
    Borrowed("torch._ops", ("OpOverload",), "tell operators from other calls"),
    Borrowed("torch:ops.aten.add.Tensor", ("_schema", "_overloadpacket"), "see what an operator changes in place"),
    Borrowed("torch._C", ("_current_graph_task_id",), "tell recomputation by checkpointing from a call"),
    Borrowed(
        "torch._C",
        ("_disabled_torch_function_impl", "_dispatch_has_kernel_for_dispatch_key", "DisableTorchFunctionSubclass"),
        "carry parts of tensors through operators",
    ),
    Borrowed("torch._C:_nn", ("scaled_dot_product_attention",), "tell torch's attention from a stand-in of others"),
    Borrowed("torch._C._distributed_c10d", ("Store",), "let ranks meet and see one another live"),
    Borrowed(
        "torch:Tensor", ("_make_subclass", "_make_wrapper_subclass", "_version"), "make lazy tensors, and see writes"
    ),
    Borrowed("torch:UntypedStorage", ("_new_with_weak_ptr",), "find tensors that blocks share without arguments"),
    Borrowed("torch:UntypedStorage()", ("_cdata",), "tell memory that is shared"),
    Borrowed("torch.cpu", ("_is_amx_tile_supported",), "know which attention kernel a CPU runs"),
    Borrowed("torch", ("_foreach_mul_",), "scale many gradients at once"),
    Borrowed(
        "torch.nn:Module()",
        ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
        "take weights out of modules, and put them back",
    ),
    Borrowed("torch.nn:Module()", ("_forward_hooks", "_forward_pre_hooks"), "see hooks that other code has put on"),
    Borrowed("torch.nn:Module()", ("_compiled_call_impl",), "tell whether a module is compiled"),
    Borrowed("torch.nn.modules.module", ("_global_forward_hooks", "_global_forward_pre_hooks"), "send hooks to copies"),
    Borrowed("torch._dynamo.eval_frame:OptimizedModule.__init__", ("_orig_mod",), "find the module that is compiled"),
    Borrowed(
        "torch._utils",
        ("_flatten_dense_tensors", "_take_tensors", "_unflatten_dense_tensors"),
        "send gradients together",
    ),
    Borrowed("torch.distributed.distributed_c10d", ("_get_default_store",), "share a state between ranks of a run"),
    Borrowed("torch.distributed.distributed_c10d:ProcessGroup", ("_get_backend",), "read the deadline of a group"),
    Borrowed("diffusers.hooks.hooks:HookRegistry.check_if_exists_or_initialize", ("_diffusers_hook",), "find caches"),
    Borrowed("diffusers.hooks.hooks:ModelHook", ("_is_stateful",), "tell caches from other hooks"),
    Borrowed("diffusers.hooks.hooks:StateManager.set_context", ("_context",), "keep a cache's branches apart"),
    Borrowed("diffusers.models.cache_utils:CacheMixin", ("_reset_stateful_cache",), "empty caches between requests"),
    Borrowed("diffusers.hooks.group_offloading", ("_get_group_onload_device",), "find the device of offloaded weights"),
    Borrowed(
        "diffusers.models.attention_dispatch:_AttentionBackendRegistry",
        ("_backends", "_constraints"),
        "stand in for attention, and ask what a backend can compute",
    ),
    Borrowed(
        "diffusers.models.attention_dispatch",
        ("_check_attention_backend_requirements", "_maybe_download_kernel_for_backend"),
        "check an attention backend before it is used",
    ),
    Borrowed(
        "diffusers.models.modeling_utils:ModelMixin.set_attention_backend", ("_attention_backend",), "know the backend"
    ),
    Borrowed("diffusers.guiders.guider_utils:BaseGuidance.enable", ("_enabled",), "train without a guider's branches"),
    Borrowed(
        "diffusers.models.modeling_utils:ModelMixin",
        ("_keep_in_fp32_modules", "_keys_to_ignore_on_load_unexpected"),
        "load weights in the precision, and with the names, that diffusers loads",
    ),
    Borrowed(
        "diffusers.pipelines.pipeline_utils:DiffusionPipeline",
        ("_execution_device", "_get_signature_keys"),
        "decode previews, and make a sibling of a pipeline",
    ),
    Borrowed(
        "diffusers.pipelines.pipeline_utils:DiffusionPipeline.set_progress_bar_config",
        ("_progress_bar_config",),
        "keep a pipeline's progress bar as it is",
    ),
    Borrowed("diffusers.schedulers.scheduling_utils:SchedulerMixin", ("_get_compatibles",), "list other schedulers"),
    Borrowed("diffusers.loaders.lora_base:LoraBaseMixin", ("_lora_loadable_modules",), "know what a LoRA changes"),
    Borrowed(
        "diffusers.loaders.lora_pipeline:FluxLoraLoaderMixin",
        ("_maybe_expand_transformer_param_shape_or_error_",),
        "let a control LoRA widen FLUX's first layer",
    ),
    Borrowed("transformers.tokenization_utils_base:PreTrainedTokenizerBase", ("_encode_plus",), "see prompts cut"),
    Borrowed(
        "transformers.modeling_utils:PreTrainedModel",
        ("_can_record_outputs", "_keys_to_ignore_on_load_missing"),
        "share one copy of an encoder's weights among the ranks of a host",
    ),
    Borrowed(
        "transformers.configuration_utils:PretrainedConfig.name_or_path.fget", ("_name_or_path",), "name an encoder"
    ),
    Borrowed("accelerate.hooks:add_hook_to_module", ("_hf_hook",), "find the device of offloaded weights"),
)


def owner_of(row: Borrowed) -> Any:
    """The object whose names a row lists; None: its module is not loaded, so that nothing of it is used yet."""
    path, _, inside = row.owner.partition(":")
    if (owner := sys.modules.get(path)) is None or not inside:
        return owner
    try:
        inner = attrgetter(inside.removesuffix("()"))(owner)
    except AttributeError:
        # Its names are missing with it.
        return object()
    return inner() if inside.endswith("()") else inner


def has(owner: Any, name: str) -> bool:
    """True if an object has a name; a function: if its code uses it."""
    if (code := getattr(owner, "__code__", None)) is not None:
        return name in code.co_names or name in code.co_consts
    return hasattr(owner, name)


def missing() -> Iterator[str]:
    """A sentence for each name that a loaded library lacks."""
    for row in BORROWED:
        if (owner := owner_of(row)) is None:
            continue
        library = row.owner.partition(":")[0].partition(".")[0]
        for name in row.names:
            if not has(owner, name):
                yield (
                    f"{library} {metadata.version(library)} has no {name!r} in {row.owner.replace(':', '.')}, by which "
                    f"ditmesh would {row.use}; install {library}=={TESTED[library]}, with which it is tested"
                )


def check_borrowed() -> None:
    """Raises `ConfigError`: a library has renamed what ditmesh relies on."""
    if sentence := next(missing(), None):
        raise ConfigError(sentence)
