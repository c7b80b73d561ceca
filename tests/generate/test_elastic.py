"""Jobs that outlive their ranks: the journal, the smaller configuration, the restart, the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from ditmesh import zoo
from ditmesh.cli.main import main
from ditmesh.config import ParallelConfig
from ditmesh.errors import ConfigError, JournalError, RankFailed
from ditmesh.forecast.candidates import resized
from ditmesh.generate import journal
from ditmesh.generate.elastic import Restarted, check_elastic, generate_elastically
from ditmesh.generate.job import Generated, PictureJob, StepDone
from ditmesh.generate.journal import Journal
from ditmesh.generate.receipt import read_receipt
from ditmesh.launch import RankPool
from ditmesh.launch.failures import lost_device
from support import elastic as on_rank
from support import processes

Ranks = Callable[[int], RankPool]

# --------------------------------------------------------------------------------------------------
# The journal


class Toy(nn.Module):
    """A transformer whose output is a view with strides of its own."""

    def forward(self, hidden_states: Tensor, timestep: Tensor, return_dict: bool = True) -> Any:
        output = torch.stack([hidden_states * timestep, hidden_states])[0].mT
        return {"sample": output} if return_dict else (output,)


LATENTS = torch.arange(12.0).reshape(3, 4)


def play(folder: Path, calls: int, changed: int | None = None, rank: int = 0, request: int = 0) -> tuple[Journal, list]:
    """Calls of a toy under a journal; before one of them the latents are changed."""
    toy = Toy().eval()
    book = Journal({"transformer": toy}, folder, rank)
    book.begin(request)
    outputs = []
    for call in range(calls):
        latents = LATENTS + (1e-6 if call == changed else 0.0)
        # Two calls at every timestep.
        outputs.append(toy(latents, timestep=torch.tensor(10.0 - call // 2), return_dict=False)[0])
    book.close()
    return book, outputs


def test_what_was_answered_is_answered_again(tmp_path: Path) -> None:
    first, truth = play(tmp_path, 4)
    assert (first.answered, first.computed) == (0, 4)
    entries = journal.keep_longest(tmp_path, 0)
    assert [(entry.call, entry.model) for entry in entries] == [(call, "transformer") for call in range(4)]
    # A view costs no more than itself.
    assert all(entry.length < 4000 for entry in entries)
    again, outputs = play(tmp_path, 6)
    assert (again.answered, again.computed) == (4, 2)
    for output, expected in zip(outputs, truth, strict=False):
        assert torch.equal(output, expected)
        assert output.stride() == expected.stride() != torch.empty(4, 3).stride()
    # What was added follows what was kept.
    assert len(journal.keep_longest(tmp_path, 0)) == 6
    assert play(tmp_path, 6)[0].answered == 6


def test_the_forward_is_put_back() -> None:
    toy = Toy()
    Journal({"transformer": toy}, "nowhere", 0).close()
    assert "forward" not in vars(toy)


def test_outputs_keep_their_class(tmp_path: Path) -> None:
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    class Model(nn.Module):
        def forward(self, hidden_states: Tensor) -> Any:
            return Transformer2DModelOutput(sample=[hidden_states, hidden_states[1]])

    for answered in (0, 1):
        model = Model()
        book = Journal({"transformer": model}, tmp_path, 0)
        book.begin(0)
        output = model(LATENTS)
        book.close()
        assert book.answered == answered
        assert type(output) is Transformer2DModelOutput
        assert torch.equal(output.sample[1], LATENTS[1])
        journal.keep_longest(tmp_path, 0)


def test_a_half_written_entry_is_ignored(tmp_path: Path) -> None:
    play(tmp_path, 3)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    starts = [0]
    for entry in journal.read(file):
        starts.append(entry.offset + entry.length)
    assert starts[-1] == len(whole)
    for cut in (*range(starts[2], starts[2] + 60), (starts[2] + len(whole)) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert len(journal.read(file)) == 2
    # Nor one that is not what was written, wherever it is.
    for place in (starts[1] + 2, starts[1] + 20, starts[1] + 60, starts[2] - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert len(journal.read(file)) == 1
    file.write_bytes(whole[:-1])
    assert len(journal.keep_longest(tmp_path, 0)) == 2
    assert play(tmp_path, 3)[0].computed == 1


def test_the_longest_is_kept_and_all_ranks_leave_it_at_the_same_call(tmp_path: Path) -> None:
    play(tmp_path, 3, rank=0)
    play(tmp_path, 5, rank=1)
    play(tmp_path, 4, rank=2)
    # Longer, of another request.
    play(tmp_path, 6, rank=3, request=1)
    assert len(journal.keep_longest(tmp_path, 0)) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["00000000.kept"]
    assert [play(tmp_path, 6, rank=rank)[0].computed for rank in (0, 1)] == [1, 1]
    # A request that begins gives up the one before.
    play(tmp_path, 2, rank=0, request=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000000.kept", "00000000.rank1", "00000001.rank0"]


def test_another_input_is_refused_by_name(tmp_path: Path) -> None:
    play(tmp_path, 4)
    journal.keep_longest(tmp_path, 0)
    with pytest.raises(JournalError, match=r"call 2 of transformer in request 0 .*: hidden_states differ"):
        play(tmp_path, 4, changed=2)


def test_steps_are_counted_by_timesteps(tmp_path: Path) -> None:
    play(tmp_path, 6)
    entries = journal.keep_longest(tmp_path, 0)
    # Of one step alone nobody knows whether it is whole.
    assert [journal.steps(entries[:count]) for count in range(7)] == [0, 0, 0, 1, 2, 2, 3]


def test_a_journal_that_cannot_be_written_does_not_end_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book, outputs = play(tmp_path / "gone", 3)
    assert (book.computed, len(outputs)) == (3, 3)
    said = capsys.readouterr().err
    assert "rank 0 cannot write its journal" in said
    assert len(said.splitlines()) == 1


# Guidance in one call of many rows; in two calls a step, run ahead by ranks that share the branches; and with a
# sampler that remembers steps.
@pytest.mark.parametrize("family", ["sd3", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("flux", "wan"))])
def test_a_request_goes_on_at_any_call_on_any_number_of_ranks(ranks: Ranks, tmp_path: Path, family: str) -> None:
    (truth,) = ranks(1).run(on_rank.with_journal, family, {"reproducible": True}, str(tmp_path / "truth"))
    calls = truth["computed"]
    assert calls == (2 if family == "sd3" else 4)
    assert truth["restored"]
    source = tmp_path / "source"
    source.mkdir()
    config = {"cfg": 2, "reproducible": True}
    recorded = ranks(2).run(on_rank.with_journal, family, config, str(source))
    assert [found["bits"] for found in recorded] == [truth["bits"]] * 2
    for known in range(calls + 1):
        for world, config in (
            (1, {"reproducible": True}),
            (2, {"cfg": 2, "reproducible": True}),
            (2, {"ulysses": 2, "reproducible": True}),
        ):
            folder = tmp_path / f"{known}-{world}-{len(config)}-{'cfg' in config}"
            folder.mkdir()
            entries = journal.read(source / "00000000.rank1")
            end = entries[known - 1].offset + entries[known - 1].length if known else 0
            whole = (source / "00000000.rank1").read_bytes()
            # The call after those was being written when the rank was killed.
            (folder / "00000000.rank1").write_bytes(whole[: end + 100])
            assert len(journal.keep_longest(folder, 0)) == known
            for found in ranks(world).run(on_rank.with_journal, family, config, str(folder)):
                assert found == {"bits": truth["bits"], "answered": known, "computed": calls - known, "restored": True}


# --------------------------------------------------------------------------------------------------
# The smaller configuration


@pytest.mark.parametrize(
    ("config", "survivors", "expected"),
    [
        ({"ulysses": 4}, [0, 1, 3], {"ulysses": 3}),
        ({"ulysses": 2}, [0], {}),
        ({"ring": 8}, range(5), {"ring": 5}),
        ({"ulysses": 2, "ring": 2}, [1, 2, 3], {"ring": 3}),
        ({"ulysses": 2, "ring": 2}, [1, 2], {"ulysses": 2}),
        # Pictures first, then branches, then tokens.
        ({"data": 2, "cfg": 2, "ulysses": 2}, range(4), {"cfg": 2, "ulysses": 2}),
        ({"data": 2, "cfg": 2}, range(2), {"cfg": 2}),
        ({"data": 2, "ulysses": 2}, range(2), {"ulysses": 2}),
        ({"cfg": 2, "ulysses": 2}, range(2), {"ulysses": 2}),
        ({"data": 4}, range(3), {"data": 3}),
        # As many as can be used: the ring grows rather than that a device idles.
        ({"cfg": 2, "ulysses": 2}, range(3), {"ring": 3}),
        ({"data": 2, "cfg": 2, "ulysses": 2}, range(7), {"ring": 7}),
        ({"data": 2, "cfg": 2, "ulysses": 2}, range(6), {"cfg": 2, "ring": 3}),
        # What decides the bits stays; it may leave a device without work.
        ({"cfg": 2, "ring": 2, "tiles": 2}, range(3), {"ring": 2, "tiles": 2}),
        ({"ulysses": 2, "text": "replicate", "tiles": 16}, [1], {"text": "replicate", "tiles": 16}),
        ({"pipe": 4}, range(3), {"pipe": 3, "patches": 4}),
        # A rank holds no more of the weights than before, as long as enough are left.
        ({"ulysses": 4, "shard": 2}, range(3), {"ulysses": 3, "shard": 3}),
        ({"cfg": 2, "ulysses": 2, "shard": 2}, range(3), {"ring": 3, "shard": 3}),
        ({"ulysses": 2, "shard": 2}, [0], {}),
        # Weights follow the ranks that are left.
        ({"ring": 3, "speeds": (3, 2, 1)}, [0, 2], {"ring": 2, "speeds": (3, 1)}),
        ({"ring": 2, "speeds": (3, 2)}, [1], {}),
        ({"cfg": 2, "ring": 2, "speeds": (3, 1)}, [1, 2, 3], {"ring": 3, "speeds": (1, 3, 1)}),
        ({"data": 4, "ring": 2, "speeds": (3, 1)}, [1, 2, 3, 4], {"data": 2, "ring": 2, "speeds": (1, 3)}),
        ({"data": 4, "ring": 2, "speeds": (3, 1)}, [0, 2, 3, 5], {"data": 2, "ring": 2, "speeds": (1, 1)}),
        ({"ring": 2, "speeds": "auto"}, [0], {"speeds": "auto"}),
    ],
)
def test_the_smaller_configuration(config: dict[str, Any], survivors: Any, expected: dict[str, Any]) -> None:
    before = ParallelConfig(**config, reproducible=True)
    found = resized(before, len(survivors), lost=set(range(before.world_size)) - set(survivors))
    assert found == ParallelConfig(**expected, reproducible=True)


def test_no_configuration_for_nobody_or_for_half_the_weights() -> None:
    with pytest.raises(ConfigError, match="no rank of ulysses=2 is left"):
        resized(ParallelConfig(ulysses=2), 0, lost=[0, 1])
    with pytest.raises(ConfigError, match="tensor=2 needs 2 ranks, and 1 is left"):
        resized(ParallelConfig(tensor=2), 1, lost=[1])
    assert resized(ParallelConfig(tensor=2, ulysses=2), 3, lost=[2]) == ParallelConfig(tensor=2)


# --------------------------------------------------------------------------------------------------
# Which failures are worth a restart


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: unknown error"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (torch.OutOfMemoryError("CUDA error: out of memory (unknown error)"), False),
        (ValueError("CUDA error: unknown error"), False),
    ],
)
def test_a_failed_gpu_is_told_from_a_failed_job(error: Exception, lost: bool) -> None:
    assert lost_device(error) is lost


@pytest.mark.parametrize(
    ("changes", "devices", "says"),
    [
        ({"reproducible": False}, 2, "add --reproducible"),
        ({}, 1, "--devices 2 or more"),
        ({"pipe": 2}, 2, "keeps keys and values of patches from step to step"),
    ],
)
def test_what_cannot_go_on_is_refused(changes: dict[str, Any], devices: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_elastic(ParallelConfig(**{"reproducible": True, **changes}), devices)


# --------------------------------------------------------------------------------------------------
# The restart


def job(folder: Path, config: dict[str, Any], prompts: tuple[str, ...] = ("a red fox",), **more: Any) -> PictureJob:
    info = zoo.EMBEDDED["emoji-sd3"]
    folder.mkdir(exist_ok=True)
    return PictureJob(
        model=str(zoo.path()),
        name="emoji-sd3",
        pipeline_class=info.pipeline,
        prompts=prompts,
        out=str(folder),
        config=ParallelConfig(**config, reproducible=True),
        steps=STEPS,
        guidance=2.0,
        max_sequence_length=info.max_sequence_length,
        timeout=120.0,
        **more,
    )


STEPS = 4
PROMPTS = ("a red fox", "a cactus")


def pixels(path: str | Path) -> bytes:
    with Image.open(path) as image:
        return numpy.asarray(image).tobytes()


class Watched:
    """An elastic job whose ranks are lost as planned, and everything that is known of it afterwards."""

    def __init__(
        self, tmp_path: Path, config: dict[str, Any], plan: dict[int, Any], monkeypatch: pytest.MonkeyPatch, **more: Any
    ) -> None:
        self.log = tmp_path / "log"
        self.log.mkdir()
        self.messages: list[Any] = []
        self.pools: list[RankPool] = []
        start = RankPool.__init__

        def started(pool: RankPool, *args: Any, **kwargs: Any) -> None:
            self.pools.append(pool)
            start(pool, *args, **kwargs)

        monkeypatch.setattr(RankPool, "__init__", started)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        job_ = job(tmp_path / "out", config, **more)
        self.error: RankFailed | None = None
        draw = partial(on_rank.draw_and_lose, log=str(self.log), plan=plan)
        try:
            self.restarts, self.seconds = generate_elastically(
                job_, job_.config.world_size, "cpu", 1, self.messages.append, draw
            )
        except RankFailed as error:
            self.error = error
        # Whatever happened: no process, no journal.
        assert [pid for pool in self.pools for pid in pool.pids if processes.alive(pid)] == []
        assert list((tmp_path / "temporary").iterdir()) == []

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def forwards(self, world: int, rank: int = 0) -> int:
        path = self.log / f"forwards-{world}-{rank}"
        return path.stat().st_size if path.exists() else 0

    def latents(self, world: int, rank: int = 0) -> list[str]:
        path = self.log / f"latents-{world}-{rank}"
        return path.read_text().split() if path.exists() else []


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[bytes]]:
    """Latents and pixels of both prompts, on one device."""
    folder = tmp_path_factory.mktemp("undisturbed")
    one = job(folder / "out", {}, PROMPTS)
    ranks(1).run(on_rank.draw_and_lose, one, log=str(folder), plan={})
    assert (folder / "forwards-1-0").stat().st_size == 2 * 2 * STEPS
    return (folder / "latents-1-0").read_text().split(), [pixels(path) for path in sorted((folder / "out").iterdir())]


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param({}, marks=pytest.mark.matrix),
        {"shard": 2},
        *(
            pytest.param({"shard": 2, "text_encoder": how}, marks=pytest.mark.matrix)
            for how in ("sharded", "rank0", "freed")
        ),
    ],
    ids=str,
)
def test_one_of_two_is_killed_in_the_second_picture(
    undisturbed: tuple[list[str], list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any]
) -> None:
    """Also where each rank had half of the weights: those that are left read theirs anew."""
    latents, pictures = undisturbed
    # Two rows a step run one by one: forwards 1 to 8 are the first picture; 13 begins the second one's third step.
    watched = Watched(tmp_path, {"ulysses": 2, **weights}, {2: (1, 13, "SIGKILL")}, monkeypatch, prompts=PROMPTS)
    assert watched.error is None
    # The same bits.
    assert watched.latents(2)[:1] + watched.latents(1) == latents
    paths = sorted((tmp_path / "out").iterdir())
    assert [pixels(path) for path in paths] == pictures
    # Only what was left was computed: two of four steps of the second picture, nothing of the first.
    assert watched.forwards(1) == 2 * (STEPS - 2)
    assert [message.receipt.index for message in watched.of(Generated)] == [0, 1]
    # Every step is reported once.
    assert sum(message.steps for message in watched.of(StepDone)) == 2 * STEPS
    # And it is said.
    (said,) = watched.of(Restarted)
    assert str(said) == (
        "rank 1 of 2 was killed by SIGKILL (from outside; the kernel does so when memory runs out); "
        f"going on from step 2 of {STEPS} of prompt 2 on 1 device"
    )
    assert [past.plain() for past in watched.restarts] == [{"step": 2, "from": 2, "to": 1}]
    receipts = [read_receipt(path) for path in paths]
    assert [receipt.restarts for receipt in receipts] == [[], [{"step": 2, "from": 2, "to": 1}]]
    assert [receipt.devices for receipt in receipts] == [2, 1]
    assert watched.seconds > 0


@pytest.mark.matrix
@pytest.mark.parametrize("shard", [1, 2])
def test_four_become_three_and_two(
    undisturbed: tuple[list[str], list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    """Rank 0 is the first to go, in the middle of a step; rank 2 of the three that are left ends by itself."""
    latents, pictures = undisturbed
    # The two branches of guidance are on two ranks each: a forward a step. The three share the tokens: two a step.
    plan = {4: (0, 2, "SIGKILL"), 3: (2, 4, "leave")}
    watched = Watched(tmp_path, {"cfg": 2, "ulysses": 2, "shard": shard}, plan, monkeypatch)
    assert watched.error is None
    assert [past.plain() for past in watched.restarts] == [
        {"step": 1, "from": 4, "to": 3},
        {"step": 2, "from": 3, "to": 2},
    ]
    # The second rank was lost between the rows of a step: that step was begun anew.
    assert watched.forwards(2) == 2 * (STEPS - 2)
    assert watched.latents(2) == latents[:1]
    (path,) = (tmp_path / "out").iterdir()
    assert pixels(path) == pictures[0]
    assert read_receipt(path).config["ring"] == 2
    assert read_receipt(path).config["shard"] == shard
    assert read_receipt(path).restarts == [past.plain() for past in watched.restarts]


@pytest.mark.parametrize("how", ["raise", pytest.param("memory", marks=pytest.mark.matrix)])
def test_an_error_of_the_job_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    watched = Watched(tmp_path, {"ulysses": 2}, {2: (1, 3, how)}, monkeypatch)
    assert watched.error is not None
    assert watched.error.lost == ()
    assert len(watched.pools) == 1
    assert watched.of(Restarted) == []


def test_a_job_that_kills_its_ranks_at_the_same_place_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dict.fromkeys((3, 2, 1), (0, 1, "SIGKILL"))
    watched = Watched(tmp_path, {"ulysses": 3}, plan, monkeypatch)
    assert watched.error is not None
    assert "rank 0 of 2 was killed by SIGKILL" in str(watched.error)
    assert [pool.world_size for pool in watched.pools] == [3, 2]


def test_the_folders_of_a_killed_owner_are_removed(tmp_path: Path, temporary: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "import time\nfrom ditmesh.launch import RankPool, guarded_folder\nif __name__ == '__main__':\n"
        "    with guarded_folder('journal-') as folder, RankPool(1, threads=1, preload=('torch',)):\n"
        "        print(folder, flush=True)\n        time.sleep(600)\n"
    )
    mark, environment = processes.marked(
        {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(temporary)}
    )
    owner = subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        folder = Path(owner.stdout.readline().strip())
        assert folder.parent == temporary
        for number in range(5000):  # Removing them takes longer than a rank needs to end.
            (folder / str(number)).touch()
    finally:
        owner.kill()
        owner.wait(10)
        owner.stdout.close()
    assert processes.wait_until_gone(mark, 10) == []
    # Nor is anything else left: not what the ranks met by, nor the fork server's socket.
    assert list(temporary.iterdir()) == []


# --------------------------------------------------------------------------------------------------
# The command


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_command_goes_on(
    undisturbed: tuple[list[str], list[bytes]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_on = RankPool.run
    pids: list[int] = []

    def run_and_kill(pool: RankPool, *arguments: Any, on_message: Any, **more: Any) -> list[Any]:
        pids.extend(pool.pids)
        heard: list[int] = []

        def hear(rank: int, message: Any) -> None:
            on_message(rank, message)
            heard.extend([message.steps] if isinstance(message, StepDone) else [])
            if pool.world_size == 2 and sum(heard) == 2:
                os.kill(pool.pids[0], signal.SIGKILL)

        return run_on(pool, *arguments, on_message=hear, **more)

    monkeypatch.setattr(RankPool, "run", run_and_kill)
    common = ["generate", "a red fox", "--steps", str(STEPS), "--threads", "1", "--device", "cpu", "--json"]
    code = run(*common, "--speeds", "2,1", "--reproducible", "--elastic", "--out", tmp_path)
    captured = capfd.readouterr()
    assert code == 0, captured.err
    result = json.loads(captured.out)
    (restart,) = result["restarts"]
    # The rank may have got a step further before it was killed.
    assert restart["step"] in (2, 3)
    assert restart == {"step": restart["step"], "from": 2, "to": 1}
    assert result["pictures"][0]["restarts"] == [restart]
    assert result["devices"] == 2
    assert pixels(result["pictures"][0]["path"]) == undisturbed[1][0]
    lines = [line for line in captured.err.splitlines() if line.startswith("ditmesh: ")]
    assert len(lines) == 1
    assert "rank 0 of 2 was killed by SIGKILL" in lines[0]
    assert lines[0].endswith(f"going on from step {restart['step']} of {STEPS} of prompt 1 on 1 device")
    assert "leaked" not in captured.err
    assert [pid for pid in pids if processes.alive(pid)] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--devices", "2", "--elastic"],
            "only reproducible mode generates the same image on them; add --reproducible",
        ),
        (
            ["--reproducible", "--elastic"],
            "--elastic with 1 device has no other device to continue on; use --devices 2",
        ),
        (["--devices", "2", "--tiles", "4"], "--tiles 4 counts in reproducible mode only; add --reproducible"),
        (["--devices", "2", "--speeds", "fast,slow"], "speeds 'fast,slow' are not numbers; write them as 2,1"),
        (["--devices", "3", "--speeds", "2,1"], "are 2, but"),
        (["--devices", "16", "--reproducible"], "16 sequence ranks cannot share tiles=8; use tiles=16"),
        (["--config", "CONFIG", "--reproducible"], "both configure; write all of it into the file"),
        (["--config", "CONFIG", "--elastic"], "'reproducible: true' to the configuration file"),
    ],
)
def test_what_the_command_refuses(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RankPool, "__init__", None)
    (tmp_path / "config.yaml").write_text("ulysses: 2")
    arguments = [str(tmp_path / "config.yaml") if word == "CONFIG" else word for word in arguments]
    assert run("generate", "a red fox", "--device", "cpu", "--out", tmp_path / "out", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1


def test_ranks_of_torchrun_are_not_started_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert run("generate", "a red fox", "--reproducible", "--elastic", "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "torchrun has started these" in said
    assert "--devices" in said


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("import pathlib; pathlib.Path('unpickled').touch()",))


def test_a_journal_runs_nothing_and_keeps_nothing_of_other_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import hashlib
    import io

    monkeypatch.chdir(tmp_path)
    play(tmp_path, 1)
    journal.keep_longest(tmp_path, 0)
    (file,) = tmp_path.iterdir()
    (entry,) = journal.read(file)
    body = io.BytesIO()
    torch.save(Evil(), body)
    for data, form in ((body.getvalue(), entry.form), (None, {"dict": {}, "class": ["os", "system"]})):
        facts = {"call": 0, "model": entry.model, "step": 0, "inputs": entry.inputs, "form": form}
        head, tensors = json.dumps(facts).encode(), data or file.read_bytes()[entry.offset :]
        frame = journal._FRAME.pack(journal._MARK, len(head), len(tensors), hashlib.sha256(head + tensors).digest())
        evil = tmp_path / "evil"
        evil.write_bytes(frame + head + tensors)
        with pytest.raises((JournalError, SafetensorError)):
            journal.read(evil)[0].output()
    assert not (tmp_path / "unpickled").exists()

    class Model(nn.Module):
        def forward(self, hidden_states: Tensor) -> Any:
            return Evil()

    model = Model()
    book = Journal({"transformer": model}, tmp_path, 0)
    book.begin(1)
    assert type(model(LATENTS)) is Evil
    book.close()
    assert "an output of class Evil cannot be kept" in capsys.readouterr().err
