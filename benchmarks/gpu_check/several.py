"""Parts that need several ranks: strategies, faults, reproducible mode, training, what lies around a transformer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from basics import (
    DEVICE,
    DTYPES,
    ON_GPU,
    Row,
    Skipped,
    digest,
    ditmesh,
    exact_float32,
    first_line,
    guarded,
    moved,
    relative_error,
)
from messages import carrying, must_be_staged
from torch import Tensor, nn
from workers import Failed, Workers

STEPS = 4
STALE = {"warmup": "fixed(1)"}
# What has several ranks on a host goes through the process group, as between GPUs.
OVER_GROUP = {"shared_memory": False}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses": 2},
    "ring": {"ring": 2},
    "tensor": {"tensor": 2},
    "cfg": {"cfg": 2},
    "data": {"data": 2},
    "ring, speeds 2,1": {"ring": 2, "speeds": (2, 1)},
    "shard": {"ulysses": 2, "shard": 2},
    "displaced": {"ring": 2, "exchange": "displaced", **STALE},
    "displaced, int8": {"ring": 2, "exchange": "displaced", "compress": "int8", **STALE},
    "naive": {"ring": 2, "exchange": "naive", **STALE},
    "pipe": {"pipe": 2, **STALE},
    "pipe, 4 patches": {"pipe": 2, "patches": 4, **STALE},
    "pipe=3": {"pipe": 3, "patches": 3, **STALE},
    "cfg x ulysses": {"cfg": 2, "ulysses": 2},
    "ulysses x ring": {"ulysses": 2, "ring": 2},
    "tensor x ring": {"tensor": 2, "ring": 2},
    "pipe x ulysses": {"pipe": 2, "ulysses": 2, **STALE},
    "data x cfg": {"data": 2, "cfg": 2},
}
FEW = ("ulysses", "ring", "tensor", "shard", "displaced", "pipe", "cfg x ulysses")


def world_of(config: dict[str, Any]) -> int:
    world = 1
    for axis in ("data", "cfg", "pipe", "tensor", "ring", "ulysses"):
        world *= config.get(axis, 1)
    return world


def same_on_ranks(per_rank: list[list[Row]], **allowed: float) -> Row:
    """One row of what every rank found: the worst of each figure; whether digests agree."""
    rows = [rank[0] for rank in per_rank]
    found: Row = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        found[name] = max(values) if isinstance(values[0], float) else values[0]
    same = all(row.get("digest") == rows[0].get("digest") for row in rows)
    good = all(row.get("ok", True) for row in rows)
    return {
        **found,
        "ranks agree": same,
        "ok": good and same and all(found[name] <= most for name, most in allowed.items()),
    }


# --- strategies ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def one_strategy(family: str, config: dict[str, Any], staged: bool) -> Iterator[Row]:
    """On a rank: errors of a strategy against the plain model in the same process.

    An exact strategy runs two requests of a pipeline; a stale one the transformer at inputs that do not move, where it
    is exact too.
    """
    package = ditmesh()
    from support import pipelines
    from support.models import inputs, run, sizes, tiny
    from support.stale import next_step

    stale = "warmup" in config
    config = {**config, **OVER_GROUP}
    if "speeds" in config:
        config["speeds"] = tuple(config["speeds"])
    if not stale:
        pipe = pipelines.MAKERS[family.lower()]()
        pipe.transformer = copy.deepcopy(pipe.transformer).to(DEVICE)
        call = moved(pipelines.arguments(family.lower(), [1, 2], steps=STEPS), torch.float32)
        pipe.set_progress_bar_config(disable=True)

        def values() -> Tensor:
            # Generators go on where they are: each call gets new ones.
            generators = [torch.Generator().manual_seed(row) for row in range(2)]
            return pipe(**{**call, "generator": generators}).images

        truth = values()
        with carrying(staged), package.parallelized(pipe, config):
            found = [values() for _ in range(2)]
        yield {"error": max(relative_error(one, truth) for one in found), "digest": [digest(one) for one in found]}
        return
    model = copy.deepcopy(tiny(family)).to(DEVICE)
    given = moved(inputs(family, sizes(family)["B=2 ragged"]), torch.float32)
    truth, errors = run(model, given), []
    with carrying(staged), package.parallelized(model, config):
        for _ in range(3):
            if "exchange" in config:
                next_step(model)
            errors.append(relative_error(run(model, given), truth))
    yield {"error": max(errors[:1] if config.get("exchange") == "naive" else errors)}


def strategies(workers: Workers, quick: bool) -> Iterator[Row]:
    """Two, three and four ranks on one device: every strategy against the plain model in float32, two requests each."""
    ditmesh()
    staged = must_be_staged(workers)
    for name in FEW if quick else STRATEGIES:
        for family in ["SD3"] if quick else ["SD3", "Flux"]:
            config = STRATEGIES[name]
            row = {"strategy": name, "model": family, "messages": _messages(workers, staged)}
            allowed = 5e-2 if "int8" in name else 1e-4

            def check(family: str = family, config: dict[str, Any] = config, allowed: float = allowed) -> Row:
                found = workers.run("one_strategy", family, config, staged, world=world_of(config), limit=60)
                return same_on_ranks(found, error=allowed)

            yield guarded(row, check)
    yield guarded(
        {"strategy": "objects", "messages": _messages(workers, staged)},
        lambda: same_on_ranks(workers.run("objects_of_ranks", staged, world=2, limit=60)),
    )


def _messages(workers: Workers, staged: bool) -> str:
    return workers.transport + (", through the host" if staged else "")


def objects_of_ranks(staged: bool) -> Iterator[Row]:
    """On a rank: Python objects of all ranks, and a boundary; they go over the host's group."""
    package = ditmesh()
    from ditmesh.comm.mesh import Mesh

    with carrying(staged):
        mesh = Mesh(package.ParallelConfig(ulysses=dist.get_world_size(), **OVER_GROUP), device=DEVICE)
        try:
            with mesh.request("objects"):
                found = mesh.world.all_gather_object({"rank": mesh.rank})
                first = mesh.world.broadcast_object(mesh.rank)
        finally:
            mesh.close()
    yield {"ok": found == [{"rank": rank} for rank in range(mesh.world_size)] and first == 0}


# --- faults --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fault(kind: str, staged: bool) -> Iterator[Row]:
    """On a rank: the last rank fails in the middle of a request; what every rank says, and the request after that."""
    package = ditmesh()
    from support import pipelines

    pipe = pipelines.sd3()
    pipe.transformer = copy.deepcopy(pipe.transformer).to(DEVICE)
    pipe.set_progress_bar_config(disable=True)

    def drawn() -> Tensor:
        call = moved(pipelines.arguments("sd3", [1, 2], steps=2), torch.float32)
        return pipe(**call).images

    truth = drawn()
    mine, seen = dist.get_rank() == dist.get_world_size() - 1, [0]

    def act(*_: Any) -> None:
        seen[0] += 1
        if mine and seen[0] == 4:
            if kind == "out of memory" and ON_GPU:
                torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
            raise torch.OutOfMemoryError("on purpose") if kind == "out of memory" else RuntimeError("on purpose")

    with carrying(staged):
        package.parallelize(pipe, {"ulysses": dist.get_world_size(), **OVER_GROUP})
        right = relative_error(drawn(), truth)
        traffic = package.engine_of(pipe).mesh.traffic
        traffic.observer, began = act, time.perf_counter()
        try:
            drawn()
            said = "nothing"
        except Exception as error:
            said = first_line(error, 160)
        seconds, traffic.observer = time.perf_counter() - began, None
        after = relative_error(drawn(), truth)
        package.restore(pipe)
    expected = said.startswith(("RuntimeError: on purpose", "OutOfMemoryError")) if mine else "PeerError" in said
    yield {"said": said, "seconds": seconds, "error": max(right, after), "ok": expected and seconds < 20}


def faults(workers: Workers, quick: bool) -> Iterator[Row]:
    """One rank fails, or has no memory left: the others say so at once, and the next request is right."""
    ditmesh()
    staged = must_be_staged(workers)
    for kind in ("exception", "out of memory"):
        row = {"fault": kind, "messages": _messages(workers, staged)}

        def check(kind: str = kind) -> Row:
            per_rank = workers.run("fault", kind, staged, world=2, limit=60)
            return same_on_ranks(per_rank[::-1], error=1e-4) | {"said": per_rank[0][0]["said"]}

        yield guarded(row, check)


# --- reproducible mode ---------------------------------------------------------------------------------------------


@torch.no_grad()
def reproducible_bits(name: str, dtype: str, configs: list[dict[str, Any]], staged: bool) -> Iterator[Row]:
    """On a rank: digests of a forward in reproducible mode for every configuration, before and after other products."""
    package = ditmesh()
    from support.models import inputs, run, sizes, tiny

    model = copy.deepcopy(tiny(name)).to(DEVICE, DTYPES[dtype])
    arguments = moved(inputs(name, sizes(name)["B=2 ragged"]), DTYPES[dtype])
    found = []
    for config in configs:
        wanted = {**config, "reproducible": True, **OVER_GROUP}
        with carrying(staged), package.parallelized(model, wanted):
            found.append(digest(run(model, arguments)))
            # A server's ranks have multiplied other matrices before: cuBLAS keeps its workspace.
            size = 4096 if ON_GPU else 64
            torch.ones(size, size, device=DEVICE) @ torch.ones(size, size, device=DEVICE)
            found.append(digest(run(model, arguments)))
    yield {"digests": found}


def heads_apart() -> Iterator[Row]:
    """Whether a kernel gives a head and a query the bits in a call of many that it gives them alone.

    Reproducible mode makes a call for every head, which is slow: a kernel with the same bits could take all of them.
    """
    if not ON_GPU:
        raise Skipped("not here: there is no GPU")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    torch.manual_seed(0)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for dtype in (torch.bfloat16, torch.float32):
            for tokens, queries, count, width in ((1024, 128, 24, 64), (4608, 576, 24, 128), (130, 33, 3, 64)):
                q, k, v = (torch.randn(1, count, tokens, width, device=DEVICE, dtype=dtype) for _ in range(3))
                row = {"model": f"{backend.name}, {count} heads of {width}", "dtype": str(dtype)[6:], "tokens": tokens}

                def check(
                    q: Tensor = q, k: Tensor = k, v: Tensor = v, queries: int = queries, kernel: Any = backend
                ) -> Row:
                    def call(heads: slice, rows: slice) -> Tensor:
                        part = (tensor[:, heads].contiguous() for tensor in (q[:, :, rows], k, v))
                        with sdpa_kernel(kernel):
                            return attend(*part)

                    every = slice(None)
                    try:
                        whole = call(every, every)
                    except RuntimeError as error:
                        raise Skipped(first_line(error, 80)) from None
                    alone = torch.cat([call(slice(head, head + 1), every) for head in range(q.shape[1])], 1)
                    third = torch.cat([call(part, every) for part in (slice(0, 1), slice(1, None))], 1)
                    parts = [slice(start, start + queries) for start in range(0, q.shape[2], queries)]
                    cut = torch.cat([call(every, part) for part in parts], 2)
                    found = {"heads alone": alone, "heads in two": third, "queries in parts": cut}
                    return {**{name: torch.equal(whole, value) for name, value in found.items()}, "ok": True}

                yield guarded(row, check)


def reproducible(workers: Workers, quick: bool) -> Iterator[Row]:
    """The bits of reproducible mode on one, two and four ranks, before and after other work of cuBLAS."""
    ditmesh()
    staged = must_be_staged(workers)

    def check(name: str, dtype: str) -> Row:
        found: set[str] = set()
        for configs in (
            [{}],
            [{"ulysses": 2}, {"ring": 2}],
            *([] if quick else [[{"ulysses": 4}, {"ulysses": 2, "ring": 2}]]),
        ):
            world = world_of(configs[0])
            for (row,) in workers.run("reproducible_bits", name, dtype, configs, staged, world=world, limit=90):
                found.update(row["digests"])
        return {"digests": len(found), "digest": min(found), "ok": len(found) == 1}

    for name in ["Flux"] if quick else ["Flux", "SD3", "Wan", "QwenImage"]:
        for dtype in ["float32"] if quick else DTYPES:
            yield guarded({"model": name, "dtype": dtype}, partial(check, name, dtype))
    try:
        yield from workers.stream("heads_apart")
    except Skipped as reason:
        yield {"model": "flash", "skipped": str(reason)}


# --- training ------------------------------------------------------------------------------------------------------


def _loss(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    output = model(**arguments)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.device, output.dtype)
    return (output * weights).mean() + output.square().mean()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {key: p.grad.detach().clone() for key, p in model.named_parameters() if p.grad is not None}


def _gradient_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The worst relative error of a gradient; of tiny ones relative to the largest of all."""
    if found.keys() != truth.keys():
        return float("inf")
    floor = 1e-3 * max(float(value.abs().max()) for value in truth.values())
    return max(
        float((found[key] - value).abs().max()) / max(float(value.abs().max()), floor) for key, value in truth.items()
    )


def one_training(how: str, config: dict[str, Any], staged: bool) -> Iterator[Row]:
    """On a rank: gradients of one step over ranks against those of the plain model in this process."""
    package = ditmesh()
    from ditmesh.train import reduce_gradients
    from support.models import inputs, sizes, tiny

    exact_float32()
    # In half precision the tiny FLUX overflows, or has other gradients for every kernel of attention.
    name = "SD3" if how in ("bf16 autocast", "fp16 scaler") else "Flux"
    alone, model = (copy.deepcopy(tiny(name)).to(DEVICE) for _ in range(2))
    arguments = moved(inputs(name, sizes(name)["B=2 ragged"]), torch.float32)
    half = {"bf16 autocast": torch.bfloat16, "fp16 scaler": torch.float16}.get(how)

    def cast() -> AbstractContextManager[Any]:
        return nullcontext() if half is None else torch.autocast(DEVICE.type, half)

    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=256.0, enabled=how == "fp16 scaler")
    with cast():
        scaler.scale(_loss(alone, arguments)).backward()
    truth, control = _gradients(alone), 0.0
    if half is not None:
        # In half precision another kernel of attention alone has other gradients.
        from torch.nn.attention import SDPBackend, sdpa_kernel

        alone.zero_grad()
        with sdpa_kernel(SDPBackend.MATH), cast():
            scaler.scale(_loss(alone, arguments)).backward()
        control = _gradient_error(_gradients(alone), truth)
    if how == "checkpointing":
        model.enable_gradient_checkpointing()
    with carrying(staged), package.parallelized(model, {**config, **OVER_GROUP}):
        mesh = package.engine_of(model).mesh
        call: nn.Module = model
        if how == "DDP":
            call = nn.parallel.DistributedDataParallel(
                model, process_group=mesh.gradient_group, find_unused_parameters=True
            )
        elif how == "FSDP2":
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            over = DeviceMesh.from_group(
                mesh.gradient_group, DEVICE.type, mesh_dim_names=(mesh.gradient_group.group_name,)
            )
            for block in (*model.transformer_blocks, *model.single_transformer_blocks):
                fully_shard(block, mesh=over)
            fully_shard(model, mesh=over)
        with cast():
            scaler.scale(_loss(call, arguments)).backward()
        if how not in ("DDP", "FSDP2"):
            reduce_gradients(model, mesh)
        found = {key: g.full_tensor() if hasattr(g, "full_tensor") else g for key, g in _gradients(model).items()}
    yield {"error": _gradient_error(found, truth), "control": control}


TRAINING: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("plain", {"ring": 2}),
    "ulysses": ("plain", {"ulysses": 2}),
    "ring, checkpointing": ("checkpointing", {"ring": 2}),
    "ulysses, checkpointing": ("checkpointing", {"ulysses": 2}),
    "ulysses, bf16 autocast": ("bf16 autocast", {"ulysses": 2}),
    "ring, fp16 scaler": ("fp16 scaler", {"ring": 2}),
    "ulysses, DDP": ("DDP", {"ulysses": 2}),
    "ulysses, FSDP2": ("FSDP2", {"ulysses": 2}),
}


def training(workers: Workers, quick: bool) -> Iterator[Row]:
    """Gradients over two ranks against one device: backward, checkpointing, autocast, scaler, DDP and FSDP2."""
    ditmesh()
    staged = must_be_staged(workers)
    for name, (how, config) in TRAINING.items():
        if quick and name not in ("ring", "ulysses, checkpointing"):
            continue
        # Hooks of DDP and FSDP2 use the group from autograd's thread, without the copies.
        if staged and how in ("DDP", "FSDP2") and ON_GPU:
            yield {"step": name, "skipped": "gloo does not carry what it sends; needs ranks over NCCL"}
            continue
        allowed = 0.2 if "autocast" in how or "scaler" in how else 2e-4

        def check(how: str = how, config: dict[str, Any] = config, allowed: float = allowed) -> Row:
            found = workers.run("one_training", how, config, staged, world=2, limit=60)
            return same_on_ranks(found, error=max(allowed, 3 * found[0][0]["control"]))

        yield guarded({"step": name, "messages": _messages(workers, staged)}, check)


# --- what lies around a transformer --------------------------------------------------------------------------------


@torch.no_grad()
def one_around(what: str, config: dict[str, Any], folder: str, staged: bool) -> Iterator[Row]:
    """On a rank: pictures of prompts, VAE included, or a model with an adapter, against one device."""
    package = ditmesh()
    config = {**config, **OVER_GROUP}
    if what == "LoRA":
        yield {"error": _with_adapter(package, config, staged)}
        return
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder).to(DEVICE)
    pipe.set_progress_bar_config(disable=True)

    def drawn(prompt: str) -> Tensor:
        given = {"generator": torch.Generator().manual_seed(0), "output_type": "pt", "max_sequence_length": 16}
        return pipe(prompt, num_inference_steps=2, height=32, width=32, **given).images

    prompts = ("a red apple", "a blue fish")
    truths = [drawn(prompt) for prompt in prompts]
    with carrying(staged), package.parallelized(pipe, config):
        found = [drawn(prompt) for prompt in prompts]
    errors = [relative_error(one, truth) for one, truth in zip(found, truths, strict=True)]
    yield {"error": max(errors), "digest": [digest(one) for one in found]}


def saved_pipeline(folder: str) -> Iterator[Row]:
    """In one worker, which is in no group: transformers has rank 0 alone write."""
    from support.tiny import save_tiny_sd3

    yield {"path": str(save_tiny_sd3(Path(folder)))}


def _with_adapter(package: Any, config: dict[str, Any], staged: bool) -> float:
    from peft import LoraConfig

    from support.models import inputs, run, sizes, tiny

    model = copy.deepcopy(tiny("SD3"))
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_out.0", "net.2"], init_lora_weights=False))
    model = model.to(DEVICE)
    given = moved(inputs("SD3", sizes("SD3")["B=2 ragged"]), torch.float32)
    truth = run(model, given)
    with carrying(staged), package.parallelized(model, config):
        return relative_error(run(model, given), truth)


AROUND: dict[str, tuple[str, dict[str, Any]]] = {
    "VAE in bands": ("pictures", {"ring": 2, "vae": "bands"}),
    "text encoders in slices": ("pictures", {"ulysses": 2, "text_encoder": "tensor"}),
    "text encoders in pieces": ("pictures", {"ulysses": 2, "text_encoder": "sharded"}),
    "text encoders freed": ("pictures", {"ulysses": 2, "text_encoder": "freed"}),
    "LoRA, ring": ("LoRA", {"ring": 2}),
    "LoRA, tensor": ("LoRA", {"tensor": 2}),
}


def around(workers: Workers, quick: bool) -> Iterator[Row]:
    """Whole pictures of prompts on two ranks with VAE and text encoders in all their forms; adapters."""
    ditmesh()
    staged = must_be_staged(workers)
    with TemporaryDirectory() as folder:
        ((saved,),) = workers.run("saved_pipeline", folder)
        for name, (what, config) in AROUND.items():
            if quick and name not in ("VAE in bands", "LoRA, tensor"):
                continue

            def check(what: str = what, config: dict[str, Any] = config) -> Row:
                found = workers.run("one_around", what, config, saved["path"], staged, world=2, limit=60)
                return same_on_ranks(found, error=1e-4)

            yield guarded({"what": name, "messages": _messages(workers, staged)}, check)


# --- the server ----------------------------------------------------------------------------------------------------


def server(workers: Workers, quick: bool) -> Iterator[Row]:
    """`ditmesh serve` on the device: a picture, a request that is refused, and the picture again with the same bits."""
    yield from workers.stream("served")


def served() -> Iterator[Row]:
    """In one worker: a server of a tiny pipeline, and its client."""
    import re
    import signal
    import subprocess
    import sys

    package = ditmesh()
    from support.tiny import save_tiny_sd3

    with TemporaryDirectory() as folder:
        model = save_tiny_sd3(Path(folder))
        command = [sys.executable, "-m", "ditmesh", "serve", "--model", f"tiny={model}", "--devices", "1"]
        command += ["--device", DEVICE.type, "--port", "0", "--folder", str(Path(folder, "state"))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            url, said = "", ""
            for line in process.stdout:
                said += line
                if found := re.search(r"http://[\d.]+:\d+", line):
                    url = found[0]
                    break
            if not url:
                raise Failed(f"the server has ended: {said.strip()[-300:]}")
            given = {"steps": 2, "seed": 3, "size": "32x32"}
            with package.Client(url) as client:
                began = time.perf_counter()
                first = client.generate("a red apple", **given)[0]
                yield {"what": "a picture", "seconds": time.perf_counter() - began, "ok": True}
                try:
                    client.generate("a red apple", **{**given, "size": "31x33"})
                    yield {"what": "a size that is refused", "ok": False}
                except package.DitmeshError as error:
                    yield {"what": "a size that is refused", "said": first_line(error, 160), "ok": True}
                again = client.generate("a red apple", **given)[0]
                yield {"what": "the picture again", "ok": first.tobytes() == again.tobytes()}
            process.send_signal(signal.SIGTERM)
            yield {"what": "the end", "ok": process.wait(60) == 0}
        finally:
            process.kill()
            process.wait()


FUNCTIONS: dict[str, Callable[..., Iterator[Row]]] = {
    "one_strategy": one_strategy,
    "objects_of_ranks": objects_of_ranks,
    "fault": fault,
    "reproducible_bits": reproducible_bits,
    "heads_apart": heads_apart,
    "one_training": one_training,
    "one_around": one_around,
    "saved_pipeline": saved_pipeline,
    "served": served,
}
PARTS = {
    "strategies": (strategies, 150),
    "faults": (faults, 30),
    "reproducible": (reproducible, 75),
    "training": (training, 75),
    "around": (around, 60),
    "server": (server, 60),
}
