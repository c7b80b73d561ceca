"""Transformers whose weights are quantised, cast layer by layer, offloaded in groups, or compiled as a whole."""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import ditmesh
from ditmesh.core.digests import weights_fingerprint
from ditmesh.errors import DitmeshError
from ditmesh.strategies.pipefusion.stages import parts_of
from ditmesh.strategies.sharded import ShardedWeights, _bytes_of
from support import ruled
from support.models import RAGGED, inputs, relative_error, run, tiny

TOLERANCE = 1e-5
LISTS = ("transformer_blocks", "single_transformer_blocks")


def in_blocks(module: nn.Module, path: str) -> bool:
    return isinstance(module, nn.Linear) and path.startswith(LISTS)


def torchao(model: nn.Module, kind: str) -> None:
    from torchao import quantization

    made = {"int8": quantization.Int8WeightOnlyConfig, "float8": quantization.Float8WeightOnlyConfig}
    quantization.quantize_(model, made[kind](), filter_fn=in_blocks)


def gguf(model: nn.Module, kind: str) -> None:
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    quant = gguf.GGMLQuantizationType[kind]
    for path, linear in list(model.named_modules()):
        if in_blocks(linear, path) and linear.in_features % 32 == 0:
            new = GGUFLinear(linear.in_features, linear.out_features, linear.bias is not None, torch.float32)
            packed = torch.from_numpy(gguf.quants.quantize(linear.weight.detach().numpy(), quant))
            new.weight, new.bias = GGUFParameter(packed, quant_type=quant), linear.bias
            owner, _, name = path.rpartition(".")
            model.get_submodule(owner)._modules[name] = new


def casting(model: Any, _: str) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def offloading(model: Any, kind: str) -> None:
    cpu = torch.device("cpu")
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=kind, num_blocks_per_group=1)


def offloaded(model: Any, _: str) -> None:
    """As `enable_sequential_cpu_offload` does it, between the CPU and the CPU."""
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


MADE = {
    "accelerate sequential": offloaded,
    "torchao int8": torchao,
    "torchao float8": torchao,
    "gguf Q8_0": gguf,
    "casting float8": casting,
    "offload block_level": offloading,
}


def outcome(name: str, config: dict[str, Any]) -> Any:
    """Errors in parallel and after it, and whether all bits are back; or what was said."""
    model = copy.deepcopy(tiny("Flux"))
    MADE[name](model, name.split()[1])
    given = inputs("Flux", RAGGED, masks=False)
    truth, before = run(model, given), weights_fingerprint(model)
    try:
        with ditmesh.parallelized(model, config):
            found = relative_error(run(model, given), truth)
    except DitmeshError as error:
        return str(error), torch.equal(run(model, given), truth)
    return max(found, relative_error(run(model, given), truth)), weights_fingerprint(model) == before


@pytest.mark.parametrize("name", MADE)
def test_right_or_refused(ranks, name):
    for config in ({"ulysses": 2}, {"ring": 2}, {"data": 2}, {"cfg": 2}, {"pipe": 2}, {"tensor": 2}):
        for found, same in ranks(2).run(outcome, name, config):
            assert same, config
            if name == "accelerate sequential" and not {"tensor", "pipe"}.isdisjoint(config):
                assert "take off CPU offloading" in found
            elif name.split()[0] in ("torchao", "gguf") and "tensor" in config:
                assert "tensor parallelism cuts plain floating-point weights" in found
            else:
                assert found <= TOLERANCE, (config, found)


def held_in_pieces(name: str) -> tuple[bool, bool, float]:
    """Whether ``shard=2`` has the bits of ``ulysses=2`` alone, and all weights after it; what a rank keeps of them."""
    model = copy.deepcopy(tiny("Flux"))
    MADE[name](model, name.split()[1])
    given, before = inputs("Flux", RAGGED, masks=False), weights_fingerprint(model)
    with ditmesh.parallelized(model, {"ulysses": 2}):
        truth = run(model, given)
    whole = sum(map(_bytes_of, model.parameters()))
    with ditmesh.parallelized(model, {"ulysses": 2, "shard": 2}):
        same = torch.equal(run(model, given), truth)
        sharded = ditmesh.engine_of(model).models[0].get(ShardedWeights)
        kept = sharded.held + sum(map(_memory_of, model.parameters()))
    return same, weights_fingerprint(model) == before, kept / whole


def _memory_of(parameter: torch.Tensor) -> int:
    return sum(part.untyped_storage().nbytes() for part in parts_of(parameter))


@pytest.mark.parametrize("name", ["torchao int8", "casting float8"])
def test_pieces_of_quantised_weights_have_their_bits(ranks, name):
    for same, back, kept in ranks(2).run(held_in_pieces, name):
        assert same
        assert back
        # Small layers outside of blocks are whole.
        assert kept <= 0.65


def test_a_quantised_weight_that_differs_shows():
    model = copy.deepcopy(tiny("Flux"))
    torchao(model, "int8")
    before = weights_fingerprint(model)
    weight = model.transformer_blocks[1].attn.to_q.weight
    name = weight.__tensor_flatten__()[0][0]
    getattr(weight, name)[0, 0] += 1
    assert weights_fingerprint(model) != before


def test_a_model_that_is_compiled_as_a_whole_is_refused():
    model = copy.deepcopy(tiny("Flux"))
    said = r"this FluxTransformer2DModel is compiled as a whole.*ParallelConfig\(compile='inductor'\)"
    with pytest.raises(ditmesh.InputError, match=said):
        ditmesh.parallelize(torch.compile(model, backend="eager"), {})
    model.compile(backend="eager")
    with pytest.raises(ditmesh.InputError, match=said):
        ditmesh.parallelize(model, {})


@ruled.needs("collectives in compiled graphs, whose tensors torch keeps until they are done")
@pytest.mark.matrix
@pytest.mark.parametrize("how", ["compile after", "blocks before", "blocks after"])
def test_compiled_before_or_after(ranks, how):
    for error in ranks(2).run(compiled, how):
        assert error <= TOLERANCE


def compiled(how):
    model, given = copy.deepcopy(tiny("Flux")), inputs("Flux", RAGGED, masks=False)
    truth = run(model, given)
    if how == "blocks before":
        model.compile_repeated_blocks(backend="eager")
    with ditmesh.parallelized(model, {"ulysses": 2}):
        if how == "compile after":
            model.compile(backend="eager")
        elif how == "blocks after":
            model.compile_repeated_blocks(backend="eager")
        return relative_error(run(model, given), truth)
