"""Plans: a model's work, predictions, the search, and the configuration that "auto" stands for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ditmesh
from ditmesh.cli.main import main
from ditmesh.config import ParallelConfig
from ditmesh.core.clock import timestep_of
from ditmesh.errors import InputError
from ditmesh.forecast import auto
from ditmesh.forecast import measurements as kept
from ditmesh.forecast import shipped as planner_shipped
from ditmesh.forecast.catalogue import shape, shapes
from ditmesh.forecast.costs.hardware import Hardware, LinkSpeed, _parts, device, known_devices, link, machine
from ditmesh.forecast.costs.step import Term
from ditmesh.forecast.costs.work import Work, Workload, as_data, from_data
from ditmesh.forecast.fit import fit_profile
from ditmesh.forecast.memory.anatomy import anatomy
from ditmesh.forecast.model_work import work_of
from ditmesh.forecast.plan import profile
from ditmesh.forecast.prediction import predict, synchronous_steps
from ditmesh.forecast.search import Model, SearchLimits, candidates, config_refusal, search
from ditmesh.forecast.shipped import WORKS, derived, shipped_data, shipped_model
from ditmesh.layout import layout_of
from ditmesh.layout.conventions import Size
from ditmesh.layout.describe import meta_model
from ditmesh.strategies.pipefusion.stages import kinds_of
from support.models import inputs, run, tiny
from support.pipelines import arguments, draw, sd3
from support.tiny import save_tiny_sd3

# Even everywhere: nothing is rounded.
EVEN = Size(rows=8, cols=8, text=32, batch=1)
JOB = Workload.of_tokens(64, 32, steps=10, element=4)


def meta(name: str) -> Any:
    """The tiny model of a family on the meta device."""
    model = tiny(name)
    return meta_model(type(model).__name__, dict(model.config))


@cache
def work(name: str) -> Work:
    model = meta(name)
    layout = layout_of(model)
    assert layout is not None
    return work_of(model, layout)


@cache
def planned(name: str) -> Model:
    """A model of the catalogue."""
    known = shape(name)
    module = meta_model(known.transformer, known.config)
    layout = layout_of(module)
    assert layout is not None
    return Model(module, layout, work_of(module, layout))


def hardware(devices: int = 2, **more: Any) -> Hardware:
    return Hardware(device=device("h100"), link=link("nvlink4"), devices=devices, **more)


# --- a model's work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Flux", "Flux2", "SD3", "PixArt", "Wan", "QwenImage", "LTX", "HunyuanVideo", "Mochi"])
def test_flops_are_those_of_torchs_counter(name):
    """At a size that the three runs have not seen, with real weights."""
    size = replace(EVEN, rows=12, cols=12, text=48)
    # The counter knows no other attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(tiny(name), inputs(name, size, masks=False))
    assert work(name).flops(144, 48) == pytest.approx(counter.get_total_flops(), rel=2e-3)


@pytest.mark.parametrize("name", ["Flux", "SD3", "Sana", "ZImage"])
def test_parameters_are_all_there(name):
    model = meta(name)
    total = sum(parameter.numel() for parameter in model.parameters())
    blocks = [len(model.get_submodule(region.blocks)) for region in layout_of(model).regions]
    assert work(name).parameters == total
    assert len(work(name).order) == sum(blocks)
    # The model is whole again, and the work survives JSON.
    assert blocks == [len(model.get_submodule(region.blocks)) for region in layout_of(model).regions]
    assert from_data(json.loads(json.dumps(as_data(work(name))))) == work(name)


BILLIONS = {"flux.1-dev": 12, "flux.2-dev": 32, "wan-14b": 14, "wan-1.3b": 1.4, "hunyuan-video": 13, "mochi-1": 10}
BILLIONS |= {"sd3.5-large": 8, "qwen-image": 20, "z-image": 6, "cogvideox-5b": 5.6, "sana-1.6b": 1.6, "ltx-video": 1.9}


def test_shipped_sizes():
    """Every one has a source; the parameters are what the models are known for."""
    assert set(BILLIONS) <= set(shapes())
    for name, known in shapes().items():
        assert len(known.source) > 20, name
        assert known.tokens(*known.size, known.num_frames) > 0
    for name, billions in BILLIONS.items():
        known = shape(name)
        module = meta_model(known.transformer, known.config)
        assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(billions, rel=0.05), name


# Classes of every kind of layout; a true size takes seconds.
LOOKED_AT = ("sd3.5-medium", "wan-1.3b")


@pytest.mark.parametrize(
    "name", [name if name in LOOKED_AT else pytest.param(name, marks=pytest.mark.matrix) for name in shapes()]
)
def test_shipped_work_is_that_of_the_class(name):
    """To the number, and the outline that ships instead of the class is refused what the class is."""
    known = shape(name)
    assert json.loads((WORKS / f"{name}.json").read_text()) == json.loads(json.dumps(shipped_data(known)))
    shipped, whole = shipped_model(known), derived(known.transformer, known.config)
    assert shipped.work == whole.work
    job, most = (
        Workload.of_tokens(4096, 512, pictures=2, branches=2),
        hardware(8, hosts=8, between=link("infiniband-ndr")),
    )
    for exactness in ("exact", "reproducible", "stale"):
        limits = SearchLimits(exactness)
        for config in candidates(whole, job, most.world_size, limits):
            assert config_refusal(config, shipped, limits) == config_refusal(config, whole, limits), config.describe()


def test_another_diffusers_asks_the_class(monkeypatch):
    monkeypatch.setattr(planner_shipped, "library_versions", lambda names: {"diffusers": "0.0.1"})
    known = shape("pixart-sigma")
    assert sum(p.numel() for p in shipped_model(known).module.parameters()) > 1e8


def test_every_part_has_a_source():
    for name in known_devices():
        assert len(device(name, "float32" if name == "cpu" else "bfloat16").source) > 10, name
    assert all(len(link(name).source) > 10 for name in _parts()["links"])


# --- what travels ------------------------------------------------------------------------------------------------


def sent(name: str, config: dict[str, Any], size: Size) -> list[int]:
    """Bytes that this rank sends in an exact step and in the one behind it."""
    model, made = tiny(name), inputs(name, size, masks=False)
    clock, found = timestep_of(model), []
    with ditmesh.parallelized(model, config):
        engine = ditmesh.engine_of(model)
        engine.begin_request(steps=2)
        for step in range(2):
            engine.mesh.traffic.reset()
            run(model, {**made, clock: made[clock] * (1 - 0.1 * step)})
            found.append(sum(engine.mesh.traffic.bytes_sent.values()))
    return found


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Flux", {"ulysses": 2}),
        ("Flux", {"ring": 2}),
        ("SD3", {"tensor": 2}),
        ("Wan", {"ulysses": 2}),
        # These cut their tokens, or put them in another order, before they project them.
        ("Flux2", {"ulysses": 2}),
        ("Flux2", {"ulysses": 2, "text": "replicate"}),
        ("Flux2", {"ring": 2, "reproducible": True, "tiles": 2}),
        ("Chroma", {"ring": 2}),
        ("Flux", {"ulysses": 2, "text": "replicate"}),
        ("SD3", {"ulysses": 2, "text": "replicate"}),
        ("SD3", {"ring": 2, "text": "replicate"}),
        ("SD3", {"ring": 2, "text": "replicate", "reproducible": True, "tiles": 2}),
        ("SD3", {"ring": 2, "text": "replicate", "exchange": "displaced", "warmup": "fixed(1)"}),
        ("Mochi", {"ulysses": 2}),
        ("Mochi", {"ring": 2}),
        ("Flux2", {"ring": 2, "text": "replicate"}),
        ("ZImage", {"ulysses": 2}),
        ("QwenImage", {"ulysses": 2}),
        ("PixArt", {"tensor": 2}),
        ("Flux", {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}),
        ("Flux", {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)", "compress": "residual4"}),
        (
            "Flux",
            {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)", "compress": "residual2", "predict": "linear"},
        ),
        ("SD3", {"ring": 2, "reproducible": True, "tiles": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else ParallelConfig(**value).describe(),
)
def test_bytes_are_those_that_travel(ranks, name, config):
    predicted = predict(ParallelConfig(**config), work(name), JOB, hardware())
    for steps in ranks(2).run(sent, name, config, EVEN):
        for terms, travelled in zip((predicted.synchronous, predicted.stale), steps, strict=True):
            assert sum(term.sent for term in terms) == pytest.approx(travelled, rel=0.02)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("SD3", {"ulysses": 2}),
        ("Flux", {"ring": 2}),
        ("SD3", {"tensor": 2}),
        ("Flux", {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"}),
    ],
    ids=lambda value: value if isinstance(value, str) else ParallelConfig(**value).describe(),
)
def test_exchanges_that_are_explained_are_those_that_travel(ranks, name, config):
    model = meta(name)
    layout = layout_of(model)
    order = kinds_of(model, layout)
    given = type(model).__name__, dict(model.config), layout, ParallelConfig(**config)
    layers, exchanges = anatomy(*given, replace(JOB, rows=EVEN.rows, cols=EVEN.cols), torch.float32)
    assert {"request", "forward"} < {layer.around for layer in layers}
    assert all(layer.reason for layer in layers)
    # One block of each kind has run, in the order of the model's own.
    kinds = list(dict.fromkeys(each.where for each in exchanges if each.where != "forward"))
    assert len(kinds) == max(order) + 1
    times = {path: order.count(kind) for kind, path in enumerate(kinds)}
    bytes_ = sum(each.bytes * times.get(each.where, 1) for each in exchanges)
    for steps in ranks(2).run(sent, name, config, EVEN):
        assert bytes_ == steps[1]


def test_a_command_explains_a_configuration(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--explain", "--devices", "4", "--ulysses", "2", "--cfg", "2", "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    layers = [(layer["around"], layer["name"]) for layer in found["layers"]]
    assert layers.index(("request", "BatchRows")) < layers.index(("request", "ExactSequence"))
    assert [each["link"] for each in found["exchanges"]] == ["ulysses", "ulysses", "sequence", "batch"]
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--explain", "--devices", "2", "--pipe", "2", "--patches", "2"])
    assert not ended.value.code
    assert "PipeFusion._around_call" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["inspect", "--explain"])
    assert "--explain needs a configuration" in capsys.readouterr().err


def test_predictions_of_branches_travel_once_a_step(ranks):
    predicted = predict(ParallelConfig(cfg=2), work("SD3"), replace(JOB, branches=2), hardware())
    for steps in ranks(2).run(sent, "SD3", {"cfg": 2}, replace(EVEN, batch=2)):
        assert sum(term.sent for term in predicted.stale) == steps[1]


# --- predictions -------------------------------------------------------------------------------------------------


def test_a_step_is_the_sum_of_its_terms():
    one = predict(ParallelConfig(ulysses=2), work("Flux"), JOB, hardware())
    assert one.step == pytest.approx(sum(term.seconds for term in one.stale))
    assert one.latency == pytest.approx(10 * one.step)
    assert one.memory == pytest.approx(sum(term.memory for term in one.kept))
    assert {"matrix products", "attention", "to heads (ulysses)"} <= {term.name for term in one.stale}


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"pipe": 2}], ids=str)
def test_a_slower_link_never_helps(config):
    # Else a tiny model is as slow as its launches, and the link does not matter.
    times, quick = [], device("h100").model_copy(update={"launch": 0.0})
    for speed in ("100GB/s", "1GB/s", "0.01GB/s"):
        chosen = hardware().model_copy(update={"link": link(speed), "device": quick})
        times.append(predict(ParallelConfig(**config), work("Flux"), JOB, chosen).latency)
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize("config", [{}, {"ulysses": 2}, {"ring": 2, "exchange": "displaced"}, {"pipe": 2}], ids=str)
def test_a_device_computes_while_the_host_launches(config):
    """A step takes as long as the slower of the two; where kernels do not wait in a queue, as long as both."""
    job = replace(JOB, cols=16384, element=2)

    def step(launch: float, ahead: bool) -> tuple[float, float]:
        chosen = device("h100").model_copy(update={"launch": launch, "ahead": ahead})
        one = predict(ParallelConfig(**config), work("Flux"), job, hardware().model_copy(update={"device": chosen}))
        host = sum(term.seconds + term.hidden for term in one.stale if term.kind == "launch")
        return one.step, host

    busy, _ = step(0.0, ahead=True)
    assert step(1e-12, ahead=True)[0] == pytest.approx(busy)
    late, host = step(1.0, ahead=True)
    assert late == pytest.approx(host)
    both, host = step(1e-3, ahead=False)
    assert both > host + 0.9 * busy


def test_links_between_hosts_are_shared_by_their_devices():
    slow = LinkSpeed(name="slow", latency=0, bandwidth=1e9)
    far = hardware(4, hosts=2, between=slow)
    inside = far.transfer("all_to_all", 1e6, 4)[0]
    outside, _, name = far.transfer("all_to_all", 1e6, 8)
    assert inside < 1e-3 < outside
    assert name == "slow"
    # Four of seven parts are for the other host, from each of its four devices.
    assert outside == pytest.approx(4 / 7 * 1e6 * 4 / 1e9)
    assert far.transfer("shift", 1e6, 8)[0] == pytest.approx(1e-3)
    # Four pieces for the other host, once each.
    assert far.transfer("all_gather", 1e6, 8)[0] == pytest.approx(4 / 7 * 1e-3)


def test_weights_are_shared_by_tensor_and_stages():
    whole, half, stage = (
        predict(ParallelConfig(**config), work("Flux"), JOB, hardware()) for config in ({}, {"tensor": 2}, {"pipe": 2})
    )
    weights = [one.weights for one in (whole, half, stage)]
    assert weights[0] == 4 * work("Flux").parameters
    assert weights[0] / 2 < weights[1] < 0.75 * weights[0]
    assert weights[2] < 0.75 * weights[0]


@pytest.mark.parametrize(("warmup", "count"), [("fixed(4)", 4), ("periodic(5)", 4), ("first_last(2, 1)", 3)])
def test_synchronous_steps_are_the_policys(warmup, count):
    assert synchronous_steps(ParallelConfig(ring=2, exchange="displaced", warmup=warmup), 20) == count


def test_compression_makes_the_messages_of_stale_steps_smaller():
    def sent(compress: str | None) -> tuple[float, float]:
        config = ParallelConfig(ring=2, exchange="displaced", warmup="fixed(1)", compress=compress)
        one = predict(config, work("Flux"), JOB, hardware())
        return tuple(
            next(term.sent for term in terms if term.name == "keys (displaced)")
            for terms in (one.synchronous, one.stale)
        )

    exact, plain = sent(None)
    width = next(one.width for block in work("Flux").blocks for one in block.operations if hasattr(one, "queries"))
    ratios = {"fp16": 2 / 4, "bf16": 2 / 4, "int8": 1 / 4, "int4": (width / 2 + 2) / width / 4}
    for compress, ratio in ratios.items():
        assert sent(compress) == (exact, pytest.approx(plain * ratio))


def test_fit_finds_the_factors():
    true = {"linear": 1.5, "attention": 0.7, "pointwise": 1.0, "launch": 2.0, "transfer": 3.0}
    generator = torch.Generator().manual_seed(0)
    measured, devices = [], hardware().devices
    for ranks in (1, devices) * 30:
        parts = torch.rand(len(true), generator=generator).tolist()
        terms = [Term(kind, kind, seconds) for kind, seconds in zip(true, parts, strict=True)]
        # They wait for the last one, more or less often.
        meetings = float(torch.randint(200, (), generator=generator)) if ranks > 1 else 0.0
        terms.append(Term("heads", "transfer", meetings=meetings))
        # Several compute a quarter slower beside one another than the profile says.
        slower = {kind: 1.25 if ranks > 1 and kind != "transfer" else 1.0 for kind in true}
        computed = sum(true[one.kind] * slower[one.kind] * one.seconds for one in terms)
        measured.append((terms, ranks, computed + 0.003 * meetings))
    found = fit_profile(hardware(), measured)
    assert all(found.scale[name] == pytest.approx(factor, rel=0.2) for name, factor in true.items())
    assert found.device.contention_factor == pytest.approx(1.25 * hardware().device.contention_factor, rel=0.05)
    assert found.link.sync_wait_seconds == pytest.approx(0.003, rel=0.1)
    assert fit_profile(hardware(), []) == hardware()


# --- the search --------------------------------------------------------------------------------------------------


def test_exactness_bounds_the_search():
    job = Workload.of_tokens(4096, 512, branches=2, steps=20)
    found = {
        which: {
            one.config.describe() for one in search(planned("qwen-image"), job, hardware(4), SearchLimits(which)).best
        }
        for which in ("exact", "reproducible", "stale")
    }
    assert not any("pipe" in name or "displaced" in name for name in found["exact"])
    assert all("reproducible" in name for name in found["reproducible"])
    assert found["exact"] < found["stale"]
    assert any("pipe" in name for name in found["stale"])


def test_guidance_goes_to_two_ranks_first():
    """One exchange a step against several a block."""
    best = search(planned("sd3.5-medium"), Workload.of_tokens(4096, 333, branches=2), hardware(2), SearchLimits()).best[
        0
    ]
    assert best.config == ParallelConfig(cfg=2)


def test_a_plan_for_a_model_that_ships_imports_models_once(tmp_path):
    """They take more processor time than all else of a plan, which is to answer at once where memory is known."""
    words = ["plan", "ltx-video", "--hardware", "h100", "--devices", "2", "--hosts", "2", "--between", "infiniband-ndr"]
    code = f"""
import sys
from ditmesh.cli.main import main
try:
    main({words!r})
except SystemExit as left:
    assert left.code == 0
print(sorted({{"diffusers", "transformers", "accelerate", "huggingface_hub"}} & set(sys.modules)))
"""
    for imported in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        assert "ltx-video on 2 hosts" in done.stdout
        assert (done.stdout.splitlines()[-1] != "[]") == imported


def test_a_large_model_on_many_devices_in_seconds():
    started = time.process_time()
    known = shape("wan-14b")
    module = meta_model(known.transformer, known.config)
    layout = layout_of(module)
    assert layout is not None
    job = Workload.of_tokens(known.tokens(1280, 720, 81), 512, branches=2, steps=50)
    far = hardware(8, hosts=8, between=link("infiniband-ndr"))
    found = search(Model(module, layout, work_of(module, layout)), job, far, SearchLimits())
    assert time.process_time() - started < 8
    assert found.best[0].config.world_size == 64


def test_nothing_fits():
    with pytest.raises(InputError, match=r"fits on no device of 2 GB: the smallest, .*, needs .* GB .*use devices"):
        search(planned("flux.1-dev"), Workload.of_tokens(4096, 512), hardware(2), SearchLimits(memory=2e9))
    with pytest.raises(InputError, match=r"no configuration .* is done in 0.001 s; the fastest, .*, is predicted"):
        search(planned("flux.1-dev"), Workload.of_tokens(4096, 512), hardware(2), SearchLimits(deadline=0.001))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("device: h1000\nlink: nvlink4\n", "'h1000' is not in the table .*did you mean 'h100'"),
        ("device: h100\nlink: string\n", "'string' is not in the table .*10GB/s"),
        ("device: h100\n", "link: is missing"),
        ("device: h100\nlink: nvlink4\ndevices: -1\n", "devices: below 1; use 1 or more"),
        ("device: {name: x, memory: .nan}\nlink: nvlink4\n", "device.memory: "),
        ("- 1\n", "holds a list"),
        ("{", "is not YAML"),
    ],
)
def test_nonsense_profiles(tmp_path, text, expected):
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=expected):
        Hardware.read(path)


def test_profiles_are_read_as_written(tmp_path):
    made = hardware(4, hosts=2, between=link("25Gb/s"), scale={"linear": 1.1}, error=0.1)
    made.save(tmp_path / "a.yaml")
    assert Hardware.read(tmp_path / "a.yaml") == made
    with pytest.raises(InputError, match="cannot read the hardware profile"):
        Hardware.read(tmp_path / "b.yaml")


# --- this machine ------------------------------------------------------------------------------------------------


def test_lines_and_products_are_fitted():
    line = profile.fit_line([1e3, 1e6, 1e7], [1e-5 + n / 2e9 for n in (1e3, 1e6, 1e7)])
    assert (line.latency, line.bandwidth) == (pytest.approx(1e-5), pytest.approx(2e9))
    sizes = [(m, k, n) for m in (16, 128, 1024) for k in (256, 1024) for n in (256, 2048)]
    times = [2 * (m + 32) * k * (n + 64) / 1e11 for m, k, n in sizes]
    speed, rows, columns = profile._fit_products(sizes, times)
    assert (speed, rows, columns) == (pytest.approx(1e11), 32, 64)


def test_doctor_saves_what_plan_reads(monkeypatch, kept_ranks, tmp_path, capfd):
    path = tmp_path / "here.yaml"
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--devices", "1", "--device", "cpu", "--save", str(path), "--json"])
    assert left.value.code == 0, capfd.readouterr().err
    made = Hardware.read(path)
    assert made.device.dtype == "float32"
    assert 1e8 < made.device.matmul < 1e14
    assert json.loads(capfd.readouterr().out)["profiles"] == [str(path)]


# --- auto --------------------------------------------------------------------------------------------------------


def auto_configs(name: str) -> tuple[str, str, bool]:
    """What "auto" takes for a pipeline with guidance, and for its bare transformer; whether the picture is right."""
    pipe, made = sd3(), arguments("sd3", [1])
    truth = draw(pipe, dict(made, generator=[torch.Generator().manual_seed(0)]))
    with ditmesh.parallelized(pipe):
        guided = ditmesh.engine_of(pipe).config.describe()
        image = draw(pipe, dict(made, generator=[torch.Generator().manual_seed(0)]))
    with ditmesh.parallelized(tiny(name)):
        bare = ditmesh.engine_of(tiny(name)).config.describe()
    return guided, bare, torch.allclose(image, truth, atol=1e-4)


def test_auto_gives_guidance_its_ranks(ranks):
    for guided, bare, right in ranks(2).run(auto_configs, "SD3"):
        assert guided == "cfg=2"
        assert bare in ("ulysses=2", "ring=2")
        assert right


def test_auto_takes_exact_strategies_only():
    """And falls back to Ulysses, then ring, where a model cannot be looked at."""
    model = tiny("Flux")
    layout, config = layout_of(model), dict(model.config)
    for size in (2, 3, 4, 6, 8):
        found = auto.chosen("FluxTransformer2DModel", config, layout, 8, auto.UsualCall(guidance=True), size)
        assert found.world_size == size
        assert found.exchange == "exact"
        assert found.pipe == found.tensor == 1
    assert auto.chosen("Unknown", {}, layout, 8, auto.UsualCall(), 4) == ParallelConfig(ulysses=4)
    assert auto.chosen("FluxTransformer2DModel", config, None, 6, auto.UsualCall(), 4) == ParallelConfig(
        ulysses=2, ring=2
    )


def test_whether_pipelines_are_guided():
    import diffusers

    assert auto.guided(diffusers.StableDiffusion3Pipeline, {})
    assert auto.guided(diffusers.WanPipeline, {})
    # Distilled guidance, or one that wants a negative prompt.
    assert not auto.guided(diffusers.FluxPipeline, {})
    assert not auto.guided(diffusers.Flux2Pipeline, {"guidance_embeds": True})
    assert not auto.guided(None, {})


def test_what_was_measured_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny("Flux")
    layout, config = layout_of(model), dict(model.config)
    call = auto.UsualCall(image=64, text=32)
    here = auto.chosen("FluxTransformer2DModel", config, layout, 8, call, 2)
    other = ParallelConfig(ring=2) if here != ParallelConfig(ring=2) else ParallelConfig(ulysses=2)
    key = kept.key_of(work("Flux"), replace(JOB, steps=28), auto.hardware_here(2).device.name, 2)
    kept.write_entry(key, {"config": other.model_dump(exclude_defaults=True), "exactness": "exact"})
    assert auto.chosen("FluxTransformer2DModel", config, layout, 8, call, 2) == other
    (tmp_path / "ditmesh" / "plans" / "broken.json").write_text("{")
    assert list(kept.entries()) == [key]
    assert kept.forget() == 2
    assert auto.chosen("FluxTransformer2DModel", config, layout, 8, call, 2) == here


# --- the command -------------------------------------------------------------------------------------------------


def plan(capfd: Any, *words: str | Path) -> tuple[int, str, str]:
    """Exit code and output of the command."""
    with pytest.raises(SystemExit) as left:
        main(["plan", *map(str, words)])
    said = capfd.readouterr()
    return left.value.code, said.out, said.err


def test_plan_as_json_and_page(capfd, tmp_path):
    page = tmp_path / "plan.html"
    code, out, err = plan(
        capfd, "flux.1-dev", "--hardware", "l40s", "--devices", "2", "--stale", "--what-if", "link=100GB/s", "--html",
        page, "--json",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert result["predicted"] is True
    times = [one["denoising_seconds"] for one in result["configurations"] if one["fits"]]
    assert times[0] == min(times)
    assert all(one["why"] and one["terms"] for one in result["configurations"])
    # With a faster link the best is no slower.
    (changed,) = result["what_if"]
    assert changed["configurations"][0]["denoising_seconds"] < times[0]
    assert "Predicted, not measured" in page.read_text()


def test_plan_in_words(capfd):
    code, out, err = plan(
        capfd,
        "flux.1-dev",
        "--hardware",
        "h100",
        "-n",
        "8",
        "--hosts",
        "2",
        "--between",
        "25Gb/s",
        "--objective",
        "cost",
    )
    assert code == 0, err
    assert "all figures are predicted" in out
    assert "25Gb/s" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("flux.1-dew", "--hardware", "h100"), "flux.1-dev"),
        (("flux.1-dev", "--hardware", "h1000"), "did you mean 'h100'"),
        (("flux.1-dev", "--hardware", "h20", "--dtype", "float32"), "no speed of h20 in float32"),
        (("flux.1-dev", "--hardware", "h100", "--link", "rope"), "10GB/s"),
        (("flux.1-dev", "--hardware", "h100", "-n", "3", "--hosts", "2"), "cannot be shared by 2 hosts"),
        (("flux.1-dev", "--hardware", "h100", "-n", "4", "--hosts", "2"), "--between"),
        (("flux.1-dev", "--hardware", "h100", "--size", "1000x1000"), "multiples of 16"),
        (("flux.1-dev", "--hardware", "4090"), "fits on no device of 24 GB"),
        (("flux.1-dev", "--hardware", "h100", "--what-if", "colour=red"), "NAME=VALUE"),
        (("flux.1-dev", "--hardware", "h100", "--what-if", "devices=many"), "not a number"),
        (("flux.1-dev", "--exact", "--stale"), "contradict"),
        ((), "say which model"),
    ],
)
def test_refusals_are_one_sentence(capfd, words, says):
    code, _, err = plan(capfd, *words)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


def test_measured_plans_are_kept_and_forgotten(monkeypatch, capfd, tmp_path, kept_ranks):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = save_tiny_sd3(tmp_path / "model")
    code, out, err = plan(capfd, model, "--devices", "2", "--device", "cpu", "--measure", "--json")
    assert code == 0, err
    measured = json.loads(out)["measured"]
    times = [one["step_seconds"] for one in measured]
    assert len(times) >= 2
    assert times == sorted(times)
    code, out, _ = plan(capfd, "--show-cache", "--json")
    (entry,) = json.loads(out)["kept"]
    assert entry["config"] == measured[0]["words"]
    assert plan(capfd, "--forget")[1].startswith("1 kept")
    assert plan(capfd, "--show-cache")[1].startswith("nothing is stored")


# --- the tables of others ----------------------------------------------------------------------------------------


TABLES = sorted((Path(__file__).parents[2] / "benchmarks" / "published").glob("*.yaml"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_published_tables_have_a_source_and_fit_the_catalogue(path):
    table = yaml.safe_load(path.read_text())
    # A file at a commit, or a thread.
    assert re.search(r"@[0-9a-f]{8}|github\.com/\S+/pull/\d+", table["source"])
    assert shape(table["model"]).tokens(*table["size"], table.get("frames", 1)) > 0
    made = machine(table["device"], table["devices"])
    assert link(table["link"]).bandwidth > 0
    for row in table["rows"]:
        assert ParallelConfig(**row["config"]).world_size <= made.world_size
        assert row["seconds"] > 0


def test_weights_in_pieces_cost_bytes_and_save_memory():
    """A step sends half of all weights in pieces; a rank keeps half of them."""
    plain, shared = (predict(ParallelConfig(ulysses=2, shard=shard), work("Flux"), JOB, hardware()) for shard in (1, 2))
    made = work("Flux")
    assert made.outside > 0
    pieces = 4.0 * (sum(block.count * block.parameters for block in made.blocks) + made.outside)
    sent = sum(term.sent for term in shared.stale if "shard" in term.name)
    assert sent == pytest.approx(pieces / 2)
    assert shared.weights - plain.weights == pytest.approx(-pieces / 2)
    assert shared.latency >= plain.latency
