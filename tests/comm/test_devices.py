"""A mesh and its model compute on one device: else all ranks refuse alike, before any of them begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import ditmesh
from ditmesh import ConfigError, Mesh, ParallelConfig
from ditmesh.comm import grid as grid_module
from ditmesh.launch.devices import nccl_settings


def refusal_of(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def misplaced() -> list[str]:
    """What this rank says of meshes that cannot be."""
    rank = torch.distributed.get_rank()
    config = ParallelConfig(ring=2, shared_memory=False)
    found: list[str] = []
    # Rank 1 alone has no backend for its device.
    with mock.patch.object(grid_module, "backend_of", return_value="" if rank else "gloo"):
        found.append(refusal_of(lambda: Mesh(config)))
    # All ranks have given the mesh another device than the model has; and one of them alone.
    mesh = Mesh(config)
    try:
        found.append(refusal_of(lambda: mesh.check_device(torch.device("cuda", rank))))
        found.append(refusal_of(lambda: mesh.check_device(torch.device("cuda") if rank else torch.device("cpu"))))
        for fine in (torch.device("cpu"), torch.device("meta"), None):
            mesh.check_device(fine)
        found.append(str(float(mesh.ring.all_reduce(torch.ones(1)))))
    finally:
        mesh.close()
    return found


def test_all_ranks_refuse_alike(ranks):
    first, second = ranks(2).run(misplaced)
    assert first[0] == second[0]
    assert first[0].startswith("rank 1: the process group carries no cpu tensors")
    # Each names its own GPU.
    assert (
        first[1]
        == second[1]
        == (
            "the model is on cuda:0, and its mesh on cpu; move the model to its rank's device before the mesh is made, "
            "or restore it, move it and parallelize it again"
        )
    )
    assert first[2] == second[2]
    assert first[2].startswith("rank 1: the model is on cuda, and its mesh on cpu; ")
    # The mesh is as it was.
    assert first[3] == second[3] == "2.0"


def mesh_on(device: str, current: int, config: ParallelConfig) -> tuple[Mesh, list[Any]]:
    """One that thinks it has ranks on GPUs, with nothing connected; and the devices that were made the current one."""
    chosen: list[Any] = []
    world = mock.Mock()
    with (
        mock.patch.object(torch.accelerator, "current_device_index", return_value=current),
        mock.patch.object(torch.accelerator, "set_device_index", chosen.append),
        mock.patch.object(grid_module, "backend_of", return_value="nccl"),
        mock.patch.object(grid_module, "find_hosts", side_effect=RuntimeError("has got so far")),
        mock.patch.object(grid_module, "gather_objects", lambda value, group: [value] * config.world_size),
        mock.patch.object(Mesh, "new_host_group", return_value=world),
        mock.patch.object(Mesh, "close", return_value=None),
        mock.patch("torch.distributed.is_initialized", return_value=True),
        mock.patch("torch.distributed.get_world_size", return_value=config.world_size),
        mock.patch("torch.distributed.get_rank", return_value=0),
    ):
        mesh = Mesh.__new__(Mesh)
        with pytest.raises(RuntimeError, match="has got so far"):
            mesh.__init__(config, device)
    return mesh, chosen


def test_the_ranks_device_is_the_current_one():
    config = ParallelConfig(ring=2)
    mesh, chosen = mesh_on("cuda:1", 0, config)
    assert chosen == [torch.device("cuda:1")]
    mesh, chosen = mesh_on("cuda", 3, config)
    assert (mesh.device, chosen) == (torch.device("cuda:3"), [])
    assert mesh_on("cuda:3", 3, config)[1] == []


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"pipe": 2}, "pipe needs exchanges to run beside computation, and CUDA_DEVICE_MAX_CONNECTIONS=1 "),
        ({"ring": 2, "exchange": "displaced"}, "exchange='displaced' needs exchanges to run beside computation"),
        ({"ring": 2}, ""),
        ({"ulysses": 2}, ""),
    ],
    ids=str,
)
def test_one_queue_for_all_kernels_is_refused_where_exchanges_run_beside(monkeypatch, config, refused):
    config = ParallelConfig(**config)
    mesh_on("cuda:0", 0, config)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    mesh_on("cuda:0", 0, config)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not refused:
        mesh_on("cuda:0", 0, config)
        return
    with pytest.raises(ConfigError) as raised:
        mesh_on("cuda:0", 0, config)
    assert str(raised.value).startswith(refused)
    assert str(raised.value).endswith("; unset it")


@pytest.mark.parametrize(("kind", "backend", "world_size"), [("cuda", "nccl", 1), ("xpu", "xccl", 2)])
def test_a_rank_joins_bound_to_its_gpu_unless_it_is_alone(monkeypatch, kind, backend, world_size):
    from ditmesh.launch.devices import join_default_group

    for name in nccl_settings(30):
        # Set first, so that it is put back.
        monkeypatch.setenv(name, "")
    with (
        mock.patch("torch.accelerator.set_device_index"),
        mock.patch("torch.distributed.is_initialized", return_value=False),
        mock.patch("torch.distributed.init_process_group") as init,
    ):
        assert join_default_group(kind, 0, world_size, 1, 30.0, "env://") == torch.device(kind, 1)
    assert init.call_args.kwargs["backend"] == f"cpu:gloo,{kind}:{backend}"
    assert init.call_args.kwargs["device_id"] == (torch.device(kind, 1) if world_size > 1 else None)


def moved_model() -> str:
    """A pipeline whose transformer is on another device than the mesh that it is given."""
    from support.pipelines import sd3

    pipe = sd3()
    mesh = Mesh(ParallelConfig(ring=2))
    # As of a model whose weights lie elsewhere between its calls.
    pipe.transformer._hf_hook = SimpleNamespace(execution_device="cuda:0")
    try:
        return refusal_of(lambda: ditmesh.parallelize(pipe, mesh.config, mesh=mesh))
    finally:
        # Other tests have the same model.
        del pipe.transformer._hf_hook
        mesh.close()


def test_a_mesh_of_another_device_is_refused(ranks):
    found = ranks(2).run(moved_model)
    assert found[0] == found[1]
    assert found[0].startswith("the model is on cuda:0, and its mesh on cpu; ")


def moved_since() -> tuple[str, bool]:
    """A pipeline whose mesh is on another device than its models, as after ``pipe.to``; and then as it was."""
    from support.pipelines import arguments, draw, sd3

    pipe = sd3()
    with ditmesh.parallelized(pipe, {"ring": 2}):
        mesh = ditmesh.engine_of(pipe).mesh
        with mock.patch.object(mesh, "device", torch.device("cuda", 0)):
            said = refusal_of(lambda: draw(pipe, arguments("sd3", [1], steps=1)))
        return said, len(draw(pipe, arguments("sd3", [1], steps=1))) > 0


def test_a_model_that_was_moved_since_is_refused_in_its_next_request(ranks):
    for said, works in ranks(2).run(moved_since):
        assert said.startswith("the model is on cpu, and its mesh on cuda:0; ")
        assert works
